"""What `make bench-network` runs, and the page it makes of what was found."""
