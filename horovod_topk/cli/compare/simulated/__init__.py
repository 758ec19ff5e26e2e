"""Simulated ranks: a comparison of quality alone, with all ranks in one process and no launcher.

Ranks hold the same weights, bit for bit, so one model stands for all of them: what each rank has of
its own is its batch, its gradients, its compressor and its residuals. The script is no training
script then; it has a function `workload(**options)` that returns a `Workload`.
"""
