"""Pushes of weights from a trainer to workers, which are given by address or as a fleet.

Owns: the choice of the workers for a push, and the calls to them. Does not own: the content of a push, or how it
travels (`weight_sync`).
"""
