"""The trainer's side of a push.

Owns: the content of a push, its buckets, and the transaction with all workers. Does not own: the trainer's tensors, or
the clients that call the workers (`rollout.publisher`).
"""
