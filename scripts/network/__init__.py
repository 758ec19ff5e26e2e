"""The runs of `make bench-network` and the page about their results."""
