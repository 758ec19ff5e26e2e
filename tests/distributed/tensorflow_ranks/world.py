"""What the cases of TensorFlow's ranks call as those of PyTorch's do."""

from __future__ import annotations

from horovod_topk.tensorflow import TopKEF

__all__ = ["TopKEF"]
