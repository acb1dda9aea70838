"""The worker's side of a push.

Owns: what has arrived, until it is committed. Does not own: the live weights (`engine.running.weights`), nor when the
engine is interrupted (`rollout.worker`).
"""
