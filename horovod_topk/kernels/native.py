"""The CPU kernels, loaded with ctypes: arguments are memory addresses, no framework is needed.

`HOROVOD_TOPK_NATIVE=0` switches them off, `HOROVOD_TOPK_ISA=avx2` or `portable` selects a lower
instruction set than the processor supports. Calls do not hold the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_topk.kernels.compile import digest

log = logging.getLogger("horovod_topk")

LIBRARY = Path(__file__).parent / "libtopkef.so"
HEADER = LIBRARY.with_name("cpu") / "topkef.h"
TENSORFLOW_LIBRARY = LIBRARY.with_name("libtopkef_tensorflow.so")
CURE = "`python -m horovod_topk.kernels.compile` compiles them"

CHOICES = {
    "HOROVOD_TOPK_NATIVE": ("1", "0"),
    "HOROVOD_TOPK_ISA": ("avx512", "avx2", "portable"),
}

Library = ctypes.CDLL
TYPES: dict[str, type | None] = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@dataclass(frozen=True)
class Found:
    """The kernel library of this process, or the reason why there is none."""

    library: Library | None
    description: str  # the instruction set in use, or why there is none


@functools.cache
def find() -> Found:
    """Load the library once, and log whether kernels are in use."""
    _warn_of_unknown()
    found = _load()
    if found.library is None:
        log.warning("TopKEF compresses on the CPU by framework operations: %s", found.description)
    else:
        log.info("TopKEF compresses on the CPU by its own kernels (%s)", found.description)
    return found


def _warn_of_unknown() -> None:
    """Warn if a kernel environment variable has an unknown value, which has no effect."""
    for variable, known in CHOICES.items():
        asked = os.environ.get(variable, known[0])
        if asked not in known:
            log.warning(
                "TopKEF: %s=%s means nothing: use one of %s", variable, asked, ", ".join(known)
            )


def _load() -> Found:
    if os.environ.get("HOROVOD_TOPK_NATIVE", "1") == "0":
        return Found(None, "HOROVOD_TOPK_NATIVE=0")
    if not LIBRARY.exists():
        return Found(None, f"none were compiled; {CURE}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return Found(None, f"the kernels do not load: {error}")
    if not hasattr(library, "topkef_digest"):
        return Found(None, f"{LIBRARY} is something else")
    library.topkef_digest.restype = ctypes.c_char_p
    if library.topkef_digest().decode() != digest():
        return Found(None, f"they were compiled from other sources; {CURE}")
    _declare(library)
    return Found(library, library.topkef_isa().decode())


def _declare(library: Library) -> None:
    """Declare result and argument types of all functions, as cpu/topkef.h states them."""
    declared = re.findall(r"TOPKEF_API (.+?)(topkef_\w+)\((.*?)\);", HEADER.read_text(), re.DOTALL)
    for result, name, arguments in declared:
        function = getattr(library, name)
        function.restype = _type_of(result)
        function.argtypes = [_type_of(each) for each in arguments.split(",") if each != "void"]


def _type_of(declaration: str) -> type | None:
    if "*" in declaration:
        return ctypes.c_char_p if "const char" in declaration else ctypes.c_void_p
    return TYPES[declaration.split()[0]]


class SgdFields(ctypes.Structure):
    """`topkef_sgd` of cpu/topkef.h."""

    _fields_ = tuple(
        (name, ctypes.c_double) for name in ("momentum", "rate", "decay", "nesterov", "loss")
    )


class AdamFields(ctypes.Structure):
    """`topkef_adam` of cpu/topkef.h."""

    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in (
            *("beta1", "beta2", "again", "now", "decay", "stays", "rate", "scale", "eps"),
            *("most", "reach"),
        )
    )


class _Numbers(ctypes.Union):
    _fields_ = (("sgd", SgdFields), ("adam", AdamFields))


class UpdateFields(ctypes.Structure):
    """`topkef_update` of cpu/topkef.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gradient", "weight", "momentum", "square")),
        *((name, ctypes.c_void_p) for name in ("largest", "arrivals", "factors", "rms")),
        ("count", ctypes.c_int64),
        ("gain", ctypes.c_double),
        ("numbers", _Numbers),
    )


class Correction(ctypes.Structure):
    """`topkef_correction` of cpu/topkef.h; keeps the memory that it points to alive."""

    _fields_ = (
        ("scales", ctypes.POINTER(ctypes.c_double)),
        ("velocities", ctypes.POINTER(ctypes.c_void_p)),
        ("following", ctypes.POINTER(ctypes.c_void_p)),
        ("momentum", ctypes.c_double),
        ("nesterov", ctypes.c_int),
        ("squares", ctypes.POINTER(ctypes.c_void_p)),
    )


class NativeBucket:
    """The kernels for one recipe; see `horovod_topk.ops.protocol.Fused` for their function.

    Arrays are addresses of contiguous elements in row-major order; `residuals`, `gradients` and
    `candidates` have one address for each tensor. The caller keeps the memory alive during a call.
    """

    def __init__(self, recipe: Sequence[int], library: Library) -> None:
        numbers = (ctypes.c_int64 * len(recipe))(*recipe)
        self._library = library
        self._handle = library.topkef_bucket_new(numbers, len(recipe))
        if not self._handle:
            raise ValueError(f"not a recipe: {recipe}")
        self.tensors = recipe[0]
        self._addresses = ctypes.c_void_p * recipe[0]
        weakref.finalize(self, library.topkef_bucket_free, self._handle)

    def encode(
        self,
        shards: Sequence[NativeBucket],
        residuals: Sequence[int],
        gradients: Sequence[int],
        candidates: Sequence[int],
        payloads: Sequence[int],
        threads: int,
        correction: Correction | None = None,
        keys: Sequence[int] = (),
    ) -> None:
        """Fill a payload for each shard; leave in the candidates what is not sent.

        Residuals, candidates and keys are in the order of the shards. keys: of random numbers,
        three numbers for each tensor as in cpu/topkef.h.

        shards: the kernels of all shards of the same gradients, with this one among them.
        """
        address, count, tensors = ctypes.c_void_p, len(shards), len(residuals)
        self._library.topkef_encode_shards(
            (address * count)(*[shard._handle for shard in shards]),
            count,
            (address * tensors)(*residuals),
            (address * len(gradients))(*gradients),
            (address * tensors)(*candidates),
            (address * count)(*payloads),
            None if correction is None else ctypes.byref(correction),
            integers(keys) if keys else None,
            threads,
        )

    def decode(
        self,
        gathered: int,
        ranks: int,
        scale: float,
        flags: Sequence[bool],
        gradients: Sequence[int],
        threads: int,
    ) -> tuple[int, int] | None:
        """Replace gradients; return the (rank, tensor) whose indices are not valid, or None."""
        wrong = self._library.topkef_decode(
            self._handle, gathered, ranks, scale, bytes(flags), self._addresses(*gradients), threads
        )
        return None if wrong < 0 else divmod(wrong, self.tensors)


def addresses(each: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Convert addresses to a ctypes array."""
    return (ctypes.c_void_p * len(each))(*each)


@functools.lru_cache(maxsize=1024)
def table(rows: tuple[tuple[int, ...], ...]) -> ctypes.Array[ctypes.c_int64] | None:
    """Convert rows of integers, which never change, to a ctypes array; None if there are none."""
    return integers([number for row in rows for number in row])


def integers(each: Sequence[int]) -> ctypes.Array[ctypes.c_int64] | None:
    """Convert integers to a ctypes array; None if there are none."""
    return (ctypes.c_int64 * len(each))(*each) if each else None


def numbers(each: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Convert floats to a ctypes array."""
    return (ctypes.c_double * len(each))(*each)
