"""Quantized matrices in checkpoints: the tensors that store a matrix, and how codes and scales are read from them.

Owns the layouts of checkpoints. Does not own the formats (`kernels.quantization`) or the files (`loader`).
"""
