"""Array operations behind one protocol, which the core uses with every framework.

Importing this package imports no framework; import the submodule you need.
"""

from horovod_topk.ops.protocol import Fused, Ops, SupportsOnePass, Velocities

__all__ = ["Fused", "Ops", "SupportsOnePass", "Velocities"]
