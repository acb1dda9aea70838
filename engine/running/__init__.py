"""A loaded model and its weights, and what computes a step with them.

Owns: all that lies on the device. Does not own: requests, sequences or blocks, which a `Step` names as arrays.
"""
