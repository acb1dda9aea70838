"""Open requests: accepted samples and scores until they end, stop strings, and routed experts.

Owns the growing samples and scores, with everything recorded for their tokens, and stop strings. Does not own which
sequence computes them (`scheduling`) or why a sample ends (`pipeline`).
"""
