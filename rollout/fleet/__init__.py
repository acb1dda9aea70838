"""Many workers as one: what keeps them running on Ray, and the client that asks them.

Owns: which workers there are, which one is asked for what, and how a request or a push outlives a worker. Does not own:
what a worker does with a request (`worker`), nor how weights travel (`weight_sync`).
"""
