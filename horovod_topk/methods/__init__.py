"""Compression methods, one file each, and the one list of them.

Adding a method is a file in this folder and a line here; see CONTRIBUTING.md.
"""

from horovod_topk.methods.dense import Dense
from horovod_topk.methods.protocol import Codec, Method, Piece
from horovod_topk.methods.randomk import RandomK
from horovod_topk.methods.topk import TopK

METHODS: dict[str, type[Method]] = {  # class in `horovod_topk.torch` and elsewhere -> method
    "TopKEF": TopK,
    "Dense": Dense,
    "RandomK": RandomK,
}

__all__ = ["METHODS", "Codec", "Dense", "Method", "Piece", "RandomK", "TopK"]
