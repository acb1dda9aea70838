"""The worker's socket, its connections, and the keys of workers and clients.

Owns: connections and the limits on them, keys, and replies that are queued for slow clients. Does not own: the format
of messages (`protocol`), or the effects of messages (`worker`).
"""
