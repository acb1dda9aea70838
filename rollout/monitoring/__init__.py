"""What a worker measures of itself, and how it is read.

Owns: metrics, histograms and the memory of the process. Does not own: what is counted, which its owners count.
"""
