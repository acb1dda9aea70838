"""The worker's side of a push.

Owns: received weights until they are committed. Does not own: the live weights (`engine.running.weights`), or
interruptions of the engine (`rollout.worker`).
"""
