"""Models: the decoder, and the search and loading of its weights, tokenizer and settings.

Owns model folders and everything read from them. Does not own the ops (`kernels`) or the memory of sequences.
"""
