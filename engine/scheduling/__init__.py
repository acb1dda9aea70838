"""What is computed next: sequences, and the scheduler.

Owns: which sequences wait and run, with the blocks, lanes and states that they hold. Does not own: what is computed
with them (`running`), nor what is drawn.
"""
