"""What travels in a push: messages, pieces and buckets, tensors as bytes.

Owns: the form of all that both sides must agree on. Does not own: how it travels (`transports`).
"""
