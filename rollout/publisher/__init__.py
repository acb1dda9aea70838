"""Weights from a trainer to the workers at some addresses, or of a fleet.

Owns: which workers a push goes to, and the calls that it makes to them. Does not own: what travels and how
(`weight_sync`).
"""
