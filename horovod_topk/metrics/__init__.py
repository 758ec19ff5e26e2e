"""Writers of metrics: JSON lines, TensorBoard, Prometheus, Keras, and a plain dictionary.

Each writer takes the counters of a step, so that it can be given to `on_step`:

    TopKEF.of(optimizer).on_step(JsonLines("rank0.jsonl"))

A writer only reads the counters: it waits for no device and starts no collective. Each writer needs
only its own library, which an extra of the same name installs: `tensorboard`, `prometheus`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from horovod_topk.core.run.stats import StepCounters

__all__ = ["JsonLines", "as_dictionary"]

# Names in TensorBoard, in Keras logs and in dictionaries; fields of StepCounters.
FIELDS = {
    "comm/sent_bytes": "sent_bytes",
    "comm/dense_bytes": "dense_bytes",
    "comm/compress_seconds": "compress_seconds",
    "comm/exchange_seconds": "exchange_seconds",
    "comm/exposed_seconds": "exposed_seconds",
    "comm/decompress_seconds": "decompress_seconds",
    "comm/sent_share": "sent_share",
    "comm/residual_norm_ratio": "residual_norm_ratio",
    "comm/probe_cosine": "probe_cosine",
    "comm/probe_error": "probe_error",
    "comm/memory_bytes": "memory_bytes",
    "comm/level": "level",
}


def as_dictionary(counters: StepCounters) -> dict[str, float]:
    """Metrics of one step by name; metrics that are not known are left out.

    Args:
        counters: the argument that `on_step` passes to its callbacks.

    Returns:
        Bytes, seconds and shares. `comm/reduction` is how many times fewer bytes this rank sent
        than a dense ring allreduce; `comm/rolled_back` and `comm/fell_back` are 0 or 1.
    """
    found = {name: getattr(counters, field) for name, field in FIELDS.items()}
    numbers = {name: float(number) for name, number in found.items() if number is not None}
    if counters.sent_bytes:
        numbers["comm/reduction"] = counters.dense_bytes / counters.sent_bytes
    numbers["comm/rolled_back"] = float(not counters.committed)
    numbers["comm/fell_back"] = float(bool(counters.fell_back))
    return numbers


class JsonLines:
    """Writes a line of JSON for each step: its number, and the metrics of `as_dictionary`.

    Of a model with several optimizers each has lines, from the second on with its position.

    Args:
        path: path of the file, one for each rank; lines are appended.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = self._open()

    def __call__(self, counters: StepCounters) -> None:
        """Write one step; open the file again if it was closed."""
        if self._file.closed:
            self._file = self._open()
        reason = {"fell_back": counters.fell_back} if counters.fell_back else {}
        whose = {"optimizer": counters.optimizer} if counters.optimizer else {}
        line = {"step": counters.step, **whose, **as_dictionary(counters), **reason}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file; a later step opens it again."""
        self._file.close()

    def _open(self) -> TextIO:
        return self._path.open("a", buffering=1, encoding="utf-8")
