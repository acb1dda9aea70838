"""Outputs: open samples and scores, stop strings, and records of routed experts.

Owns open samples and scores, everything recorded for their tokens, and the search for stop strings. Does not own the
sequences that compute samples and scores (`scheduling`), or the decision that a sample ends (`pipeline`).
"""
