"""What every TensorFlow rank does around a case; see ../meeting.py."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

# The stand-in there is for `horovodrun`; tf-keras is for Horovod's own wrapper. Keras 3 is `keras`.
sys.path[:] = [path for path in sys.path if not path.endswith("without_tensorflow")]
os.environ |= {"TF_USE_LEGACY_KERAS": "1", "KERAS_BACKEND": "tensorflow"}
# Keras imports them where they are installed, which takes each rank a second.
sys.modules |= dict.fromkeys(("matplotlib", "sklearn"))  # type: ignore[arg-type]

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from horovod_topk.process_sets import find_or_add
from meeting import Meeting, choose


def pytest_configure(config: pytest.Config) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    config.pluginmanager.register(Meeting(hvd.rank(), hvd.size()), "meeting")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not any(map(item.get_closest_marker, ("everywhere", "one_in"))):
            item.add_marker(pytest.mark.one_in(6))  # graphs take long to build
    choose(config, items, hvd.size())
    gc.freeze()


@pytest.fixture(autouse=True)
def _forget_models() -> Iterator[None]:
    """End a case's models, and with them its residuals, with the case.

    TensorFlow keeps more with every graph: what is left by now is not searched again.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def pair() -> Iterator[hvd.ProcessSet]:
    """A process set of ranks 0 and 1; a hierarchical exchange may have added it already."""
    (process_set,) = find_or_add([[0, 1]])
    yield process_set
    hvd.remove_process_set(process_set)
