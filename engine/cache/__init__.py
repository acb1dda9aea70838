"""KV memory: its blocks, the prefixes they hold, and the arenas from which memory is carved.

Owns which blocks are free, shared or published, and under which identity. Does not own which sequence is computed
(`scheduling`) or the tensors of the blocks (`running.model_runner`).
"""
