"""KV memory: its blocks and the prefixes they hold, and the arenas that memory is carved from.

Owns: which blocks are free, shared or published, and under which identity. Does not own: which sequence is computed
(`scheduling`), nor the tensors of blocks (`running.model_runner`).
"""
