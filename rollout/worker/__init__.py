"""The worker: requests and control calls in front of one engine.

Owns: every request from its submission to its one terminal reply, the state of the worker, and the threads that connect
socket, engine and pushes. Does not own: the socket (`network`), the engine, or the transport of a push
(`weight_sync.worker`).
"""
