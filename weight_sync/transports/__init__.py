"""The transports that carry the bytes of a push, each with its two ends.

Owns: shared memory, groups, folders and handles, and the rules for their use. Does not own: the content of the bytes
(`payload`).
"""
