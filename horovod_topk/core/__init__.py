"""The framework-neutral implementation of the training step; imports no framework and no NumPy.

It computes on arrays only through `horovod_topk.ops.Ops` and communicates only through
`core.exchange.Collective`; callers pass both.
"""
