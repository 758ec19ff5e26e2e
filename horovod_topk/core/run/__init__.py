"""The step, what a host sees of it, counting, statistics and timing."""
