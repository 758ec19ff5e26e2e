"""Array operations behind one protocol: what the core asks of a framework.

Importing this package loads no framework; import the submodule you need.
"""

from horovod_topk.ops.protocol import Clears, Fused, Ops, Together

__all__ = ["Clears", "Fused", "Ops", "Together"]
