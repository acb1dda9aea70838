"""Scheduling: sequences, and the choice of the tokens that the next step computes.

Owns which sequences wait and which run, with the blocks, lanes and states that they hold. Does not own the computation
(`running`) or the draws (`running.sampler`).
"""
