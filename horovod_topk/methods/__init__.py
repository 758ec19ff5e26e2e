"""Compression methods, one file each, and the one list of them.

Adding a method is a file in this folder and a line here; see docs/adding-a-method.md.
"""

from horovod_topk.methods.bytegrad import ByteGrad
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.onebit import OneBit
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.protocol import Codec, Method, Piece
from horovod_topk.methods.qsgd import QSGD
from horovod_topk.methods.randomk import RandomK
from horovod_topk.methods.signsgd import SignSGD
from horovod_topk.methods.terngrad import TernGrad
from horovod_topk.methods.threshold import Threshold
from horovod_topk.methods.topk import TopK

METHODS: dict[str, type[Method]] = {  # name of the compressor class in every adapter -> method
    "TopKEF": TopK,
    "Dense": Dense,
    "RandomK": RandomK,
    "QSGD": QSGD,
    "SignSGD": SignSGD,
    "PowerSGD": PowerSGD,
    "OneBit": OneBit,
    "ByteGrad": ByteGrad,
    "TernGrad": TernGrad,
    "Threshold": Threshold,
}

__all__ = [
    "METHODS",
    "QSGD",
    "ByteGrad",
    "Codec",
    "Dense",
    "Method",
    "OneBit",
    "Piece",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
]
