"""Triton kernels for the methods that send all elements of a tensor in few bits."""
