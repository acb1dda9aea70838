"""The transports for the bytes of a push, each with a trainer's end and a worker's end.

Owns: the shared memory, process groups, folders and GPU memory handles of pushes, and the rules for their use. Does not
own: the content of the bytes (`payload`).
"""
