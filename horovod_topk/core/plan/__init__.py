"""What is exchanged, and how it is laid out: integers that are equal on all ranks."""
