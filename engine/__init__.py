"""The generation engine: takes requests, computes them one step at a time, and returns samples.

Owns each request from its acceptance until its output is returned. Knows nothing about sockets, users or the source of
new weights. `engine.engine` connects the parts of this package.
"""
