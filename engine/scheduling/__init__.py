"""Scheduling: tracks sequences, and chooses the tokens that the next step computes.

Owns the waiting and running sequences, and the blocks, lanes and recurrent states that running sequences hold. Does not
own the computation (`running`) or sampling (`running.sampler`).
"""
