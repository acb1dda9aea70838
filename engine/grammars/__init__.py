"""Grammars, which restrict the texts that a sample may have.

Owns the types and limits of grammars (`source`), the translation of grammars for llguidance, and the masks of a sample
(both in `matching`). Also owns the child processes that handle the grammars of requests (`masks`, `child`). Does not
own the request, or the change that a mask makes to logits (`kernels.edits`).
"""
