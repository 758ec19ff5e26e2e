"""Kernels for lists of tensors: updates of optimizers, and what they are told of gradients."""
