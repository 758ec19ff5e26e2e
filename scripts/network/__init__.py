"""The runs of `make bench-network`, and the page with their results."""
