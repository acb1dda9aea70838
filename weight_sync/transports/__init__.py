"""The ways that the bytes of a push go, each with its two ends.

Owns: shared memory, groups, folders and handles, and who may use them. Does not own: what the bytes are (`payload`).
"""
