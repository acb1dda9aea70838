"""Monitoring of a worker: metrics, histograms and the resident memory of its process.

Owns: the export of metrics. Does not own: the counters, which belong to the worker and the engine.
"""
