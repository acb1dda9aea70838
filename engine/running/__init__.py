"""Running: a loaded model, its weights, and the computation of a step with them.

Owns everything on the device. Does not own requests, sequences or blocks; a `Step` describes them as arrays.
"""
