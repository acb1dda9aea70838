"""The command line and its programs.

Owns options and printed output. Does not own the workers and clients that the programs use.
"""
