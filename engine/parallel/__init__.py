"""Workers with several ranks: a model's layers divided among processes on one machine (tensor parallelism).

Rank 0 is the leader. The leader has the requests, the scheduler and the prefix cache, and plans every step. The other
ranks are followers: child processes that compute the steps that the leader sends. Each follower has its own part of the
weights and of the KV cache. Block tables come from the leader, so that a block holds the KV of the same tokens on all
ranks by construction.

Owns the processes, the messages between them, and the memory through which layers exchange sums (`kernels.ranks`). If a
rank fails, the whole worker fails, and all its processes end.
"""
