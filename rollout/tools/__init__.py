"""The command line, and the programs behind it.

Owns: options, and what is printed. Does not own: what the programs start or ask.
"""
