"""The worker: requests and control calls in front of one engine.

Owns: every request from its submission to its one terminal reply, the state of the worker, and the threads that join
socket, engine and pushes. Does not own: the socket (`network`), the engine, nor how the bytes of a push arrive
(`weight_sync.worker`).
"""
