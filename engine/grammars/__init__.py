"""Grammars, which restrict the texts that a sample may have.

Owns the types and limits of grammars (`source`), and their translation for llguidance and the masks of a sample
(`matching`). Also owns the child processes that handle the grammars of requests (`masks`, `child`). Does not own the
request, or the change that a mask makes to logits (`kernels.edits`).
"""
