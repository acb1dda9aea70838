"""Drafts: guesses of the next tokens of samples, which a step verifies by drawing.

A step computes the last token of a sample and k drafted tokens behind it as one chunk, and draws after each of these
rows. A draw is a function of its logits, its parameters, its seed and its position, so the draws up to the first one
that differs from its draft are the tokens that k + 1 steps would draw. The step accepts them, and nothing of the other
rows remains. A wrong draft therefore costs time and changes no bit.

Owns the drafters, the number of drafted tokens, and their statistics. Does not own sequences, blocks or draws.
"""
