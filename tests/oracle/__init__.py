"""What the core is judged by: simulated ranks, and an independent reader of what they send.

Nothing here calls `core.codec.codec` or `core.plan.payload` to learn what is right.
"""
