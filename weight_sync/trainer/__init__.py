"""The trainer's side of a push.

Owns: what is sent, in which buckets, and the transaction that all workers take part in. Does not own: the trainer's
tensors, nor the calls to workers (`rollout.publisher`).
"""
