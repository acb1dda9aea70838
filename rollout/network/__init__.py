"""The worker's socket, its connections, and the keys of workers and clients.

Owns: connections and their limits, keys, and replies that wait for slow readers. Does not own: the format of messages
(`protocol`), or the effects of messages (`worker`).
"""
