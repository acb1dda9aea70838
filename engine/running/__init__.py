"""Running: the loaded model, its weights, and the computation of steps.

Owns everything on the device. Does not own requests, sequences or blocks. A `Step` describes the work of a step as
arrays.
"""
