"""Kernels for lists of tensors: optimizer updates, and the sums of gradients they need."""
