"""The command line and its programs.

Owns the options and the printed output. Does not own the workers and clients that the programs use.
"""
