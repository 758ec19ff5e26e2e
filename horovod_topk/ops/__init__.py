"""Array operations behind one protocol: what the core asks of a framework.

Importing this package loads no framework; import the submodule you need.
"""

from horovod_topk.ops.protocol import Fused, Ops, SupportsOnePass, Velocities

__all__ = ["Fused", "Ops", "SupportsOnePass", "Velocities"]
