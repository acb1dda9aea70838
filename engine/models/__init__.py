"""The decoder, and how its weights, its tokenizer and its settings are found and loaded.

Owns: folders of models and what is read from them. Does not own: the ops (`kernels`), nor the memory of sequences.
"""
