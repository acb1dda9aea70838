"""KV memory: blocks, the index of cached prefixes, and the arenas from which memory is allocated.

Owns the state of each block (free, shared or published) and the identity under which it is published. Does not own the
choice of sequences to compute (`scheduling`) or the tensors of the blocks (`running.model_runner`).
"""
