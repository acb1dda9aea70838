"""The content of a push: messages, pieces and buckets, and tensors as bytes.

Owns: the formats on which trainer and worker must agree. Does not own: the transport of the bytes (`transports`).
"""
