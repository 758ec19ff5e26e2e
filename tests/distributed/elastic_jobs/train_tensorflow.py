"""An elastic job with TensorFlow, in a graph; see `story`."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

sys.path[:] = [path for path in sys.path if not path.endswith("without_tensorflow")]

import horovod.tensorflow as hvd
import story
import tensorflow as tf

import horovod_topk.tensorflow
from horovod_topk.core.run.substitute import parse
from horovod_topk.tensorflow.elastic import TensorFlowState, run

hvd.init()
tf.random.set_seed(os.getpid())
weights = [tf.Variable(tf.random.normal([50, 60])), tf.Variable(tf.random.normal([60, 9]))]
asked, kept = parse(os.environ["COMPRESSOR"]), os.environ.get("COMMIT_DIR")
topk = getattr(horovod_topk.tensorflow, asked.name)(**asked.settings)


every, local = os.environ.get("LOCAL_STEPS"), None
if every:
    outer = horovod_topk.tensorflow.Outer(lr=0.7, momentum=0.5)
    own = {"every": int(every), "outer": outer}
    local = horovod_topk.tensorflow.LocalSteps(None, weights, compression=topk, **own)


@tf.function
def update(inputs: Any) -> None:
    """One step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(inputs @ weights[0] @ weights[1]))
    if local is None:
        tape = hvd.DistributedGradientTape(tape, compression=topk)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(1e-6 * gradient)


def step(middle: Callable[[], None]) -> None:
    """The others' payloads are under way when a rank dies before its own."""
    inputs = tf.random.normal([8, 50])
    middle()
    update(inputs)
    if local is not None:
        local.step()


def digest(tensors: list[Any]) -> str:
    """Of all bits of some tensors."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def facts() -> dict[str, Any]:
    """What all ranks owe, their weights, and what was lost."""
    sizes = [tf.size(weight) for weight in weights]
    owed, norm, lost, shared = tf.zeros([sum(sizes)]), 0.0, None, []
    if topk._living_states():
        state = topk.state_dict()
        residuals = state["residuals"]
        names = [key for key in ("state.q", "state.anchor", "state.outer_momentum") if key in state]
        shared = [array for key in names for _, array in sorted(state[key]["residuals"].items())]
        owed = tf.concat([residuals[name] for name in sorted(residuals)], 0)
        norm, lost = topk.stats().residual_norm, topk.stats().lost_ranks
    mean = hvd.allreduce(owed, op=hvd.Average, name="owed")
    return {
        "owed": mean[::50].numpy().tolist(),
        "norm": norm,
        "weights": [float(tf.reduce_sum(tf.cast(w, tf.float64))) for w in weights],
        "bits": digest([*weights, *shared]),
        "lost": lost,
    }


@run
def train(state: TensorFlowState) -> None:
    """All of it."""
    story.live(state, step, lambda: (hvd.rank(), hvd.size()), facts)


train(TensorFlowState(weights, topk, kept, step=0, chapter=0, since=0))
