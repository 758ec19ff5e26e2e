"""Local steps: each rank trains alone for some steps, then ranks exchange how far they have moved.

The adapters' `LocalSteps` take inner steps and, now and then, an outer step. A rank's movement is
compressed like a gradient, with error feedback; the mean moves the anchor, which all ranks go on
from. `settings.py` has what users set and the published presets, `outer.py` the formulas and what
is kept and sent, `rounds.py` the order of an outer step. Nothing here knows a framework.

Local SGD (Stich 2018, arXiv 1805.09767), SlowMo (1910.00643), DiLoCo (2311.08105), Streaming DiLoCo
(2501.18512), SparseLoCo (2508.15706).
"""

from horovod_topk.local.settings import Outer

__all__ = ["Outer"]
