"""Weights from a trainer to the workers at some addresses."""
