"""The content of a push: messages, pieces and buckets, and tensors as bytes.

Owns: the formats that both sides must agree on. Does not own: the transport of the bytes (`transports`).
"""
