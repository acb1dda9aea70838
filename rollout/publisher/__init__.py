"""Pushes of weights from a trainer to workers, given by their addresses or by a fleet.

Owns: the choice of the workers for a push, and the calls to them. Does not own: the content of a push, or how it
travels (`weight_sync`).
"""
