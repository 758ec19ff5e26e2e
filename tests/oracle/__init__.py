"""What the core is judged by: simulated ranks, an independent reader, an independent algorithm.

Nothing here calls `horovod_topk.core.codec` or `horovod_topk.core.payload` to learn what is right.
"""
