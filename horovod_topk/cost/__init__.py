"""What a step of training costs, by formula: Horovod's own exchanges, PowerSGD's and ours.

Integers come from the plan and from `Traffic`, seconds from a `Machine`; no framework and no NumPy
are imported. `docs/plan.md` has every formula with its source.
"""
