"""What is computed next: sequences, and the scheduler."""
