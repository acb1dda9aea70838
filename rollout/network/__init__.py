"""The worker's socket: who may connect, and what is on its way to whom; keys for both ends.

Owns: connections and their limits, keys, and replies that wait for slow readers. Does not own: what messages mean
(`protocol`), nor what they do (`worker`).
"""
