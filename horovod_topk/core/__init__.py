"""The algorithm, once, for every framework: imports no framework and no NumPy.

Arrays are touched only through `horovod_topk.ops.Ops`, the network only through
`horovod_topk.core.exchange.Collective`; both are passed in.
"""
