"""Weights from a trainer to its workers: what travels, by which transports, and both ends of it.

Owns: a push from its first byte to its commit or its end. Does not own: the engine, which knows nothing of pushes, nor
the socket by which pushes are called.
"""
