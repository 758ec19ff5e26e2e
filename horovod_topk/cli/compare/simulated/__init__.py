"""Simulated ranks: a comparison of quality, with all ranks in one process and no launcher.

Ranks have the same weights, bit for bit, so one model serves all of them. Each rank has its own
batch, gradients, compressor and residuals. Instead of a training loop, the script has a function
`workload(**options)` that returns a `Workload`.
"""
