"""Native code that encodes and decodes a whole bucket at once.

`native` and `cpu/` are C++ for the CPU, `triton/` is for GPUs. Both do what the verbs of
`horovod_topk.ops` do, to the same bits; without them everything works through the verbs.
"""
