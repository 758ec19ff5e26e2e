"""Formulas for the time of a training step with Horovod's exchanges, PowerSGD and ours.

Byte counts come from the plan and from `Traffic`, seconds from a `Machine`; neither a framework nor
NumPy is imported. `docs/plan.md` has every formula with its source.
"""
