"""Pushes of weights from a trainer to workers. The caller specifies the workers by address or as a fleet.

Owns: the choice of the workers for a push, and the calls to these workers. Does not own: the content or the transport
of a push (`weight_sync`).
"""
