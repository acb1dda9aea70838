"""Weights from a trainer to its workers: what travels, by which transports, and both ends of it."""
