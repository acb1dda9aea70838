"""The worker: handles requests and control calls for one engine.

Owns: every request from submission to terminal reply, the state of the worker, and the threads between the socket, the
engine and pushes. Does not own: the socket (`network`), the engine, or the transport of a push (`weight_sync.worker`).
"""
