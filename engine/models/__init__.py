"""Models: the decoder, and the code that finds and loads its weights, tokenizer and settings.

Owns access to model folders and their files. Does not own the ops (`kernels`) or the memory of sequences.
"""
