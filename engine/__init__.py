"""The generation engine: takes requests, computes them one step at a time, and returns samples.

Owns everything between an accepted request and its output. Does not own sockets, users, or the source of new weights.
`engine.engine` connects the parts of this package.
"""
