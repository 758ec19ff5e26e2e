"""An elastic job with TensorFlow, in a graph; see `story`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

sys.path[:] = [path for path in sys.path if not path.endswith("without_tensorflow")]

import horovod.tensorflow as hvd
import story
import tensorflow as tf

from horovod_topk.tensorflow import TopKEF
from horovod_topk.tensorflow.elastic import TensorFlowState, run

hvd.init()
tf.random.set_seed(os.getpid())
weights = [tf.Variable(tf.random.normal([50, 60])), tf.Variable(tf.random.normal([60, 9]))]
topk = TopKEF(0.05, min_numel=0, commit_dir=os.environ.get("COMMIT_DIR"), values="int8")


@tf.function
def update(inputs: Any) -> None:
    """One step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(inputs @ weights[0] @ weights[1]))
    tape = hvd.DistributedGradientTape(tape, compression=topk)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(1e-6 * gradient)


def step(middle: Callable[[], None]) -> None:
    """The others' payloads are under way when a rank dies before its own."""
    inputs = tf.random.normal([8, 50])
    middle()
    update(inputs)


def facts() -> dict[str, Any]:
    """What all ranks owe, their weights, and what was lost."""
    sizes = [tf.size(weight) for weight in weights]
    owed, norm, lost = tf.zeros([sum(sizes)]), 0.0, None
    if topk._living_states():
        residuals = topk.state_dict()["residuals"]
        owed = tf.concat([residuals[name] for name in sorted(residuals)], 0)
        norm, lost = topk.stats().residual_norm, topk.stats().lost_ranks
    mean = hvd.allreduce(owed, op=hvd.Average, name="owed")
    return {
        "owed": mean[::50].numpy().tolist(),
        "norm": norm,
        "weights": [float(tf.reduce_sum(tf.cast(w, tf.float64))) for w in weights],
        "lost": lost,
    }


@run
def train(state: TensorFlowState) -> None:
    """All of it."""
    story.live(state, step, lambda: (hvd.rank(), hvd.size()), facts)


train(TensorFlowState(weights, compression=topk, step=0, chapter=0, since=0))
