"""A fleet of workers: a supervisor that keeps workers running on Ray, and a client that spreads requests over the
workers.

Owns: the set of workers, the choice of a worker for each request, and the recovery of requests and pushes when a worker
is lost. Does not own: how a worker answers a request (`worker`), nor how weights are transferred (`weight_sync`).
"""
