"""Native code that encodes and decodes a whole bucket at once.

`native` and `cpu/` are C++ for the CPU, `triton/` is for GPUs. Both compute the same bits as the
operations of `horovod_topk.ops`, which are used where there is no kernel.
"""
