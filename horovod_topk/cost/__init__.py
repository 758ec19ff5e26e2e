"""Formulas for the time of a training step: with Horovod's exchanges, with PowerSGD and with ours.

Integers come from the plan and from `Traffic`, seconds from a `Machine`; no framework and no NumPy
are imported. `docs/plan.md` has every formula with its source.
"""
