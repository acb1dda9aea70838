"""What becomes of an accepted request while it is open, and when its samples end.

Owns: samples and scores in the making, with all that is recorded of their tokens, and stop strings. Does not own: which
sequence computes them (`scheduling`), nor why a sample ends (`pipeline`).
"""
