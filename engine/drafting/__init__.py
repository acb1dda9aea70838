"""Drafts: guesses of a sample's next tokens, which a step compares with the tokens that it draws.

A step computes the last token of a sample and k drafted tokens as one chunk of k + 1 rows, and draws a token from each
row. A draw depends only on its logits, its sampling parameters, its seed and its position. The logits of a row depend
only on the tokens up to this row. Up to and including the first draw that differs from the draft, the draws are
therefore the tokens that steps without drafts would draw. The step accepts the draws up to and including the first draw
that differs from the draft, and discards the later draws. A wrong draft costs time, but does not change any bit of a
sample.

Owns the drafters, the choice of how many tokens to draft, and the statistics of drafts. Does not own sequences, blocks
or draws.
"""
