"""What is computed next: sequences, the scheduler, and a step as plain arrays."""
