"""What the core is judged by: simulated ranks, an independent reader, an independent algorithm.

Nothing here calls `core.codec.codec` or `core.plan.payload` to learn what is right.
"""
