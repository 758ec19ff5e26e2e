#!/usr/bin/env bash
# In eager TensorFlow the sign of a constant zero is that of the first zero of its dtype.
#
# tensorflow-cpu 2.20.0, on a CPU, no other package. Scalars that tf.constant and
# tf.convert_to_tensor make of Python floats are kept, and found again by their value and dtype. 0.0
# and -0.0 are equal, so that whichever comes second has the sign of the first. Where -0.0 was first,
# 1 / tf.constant(0.0) is -inf in all later code of the process. Lists, NumPy's scalars and
# functions of tf.function keep the sign.
#
# Output seen on 2026-11-29:
#     0.0 first, 1 / -0.0            inf
#     -0.0 first, 1 / 0.0            -inf
#     converted, 1 / -0.0            inf
#     in a list, 1 / -0.0            -inf
#     in a function, 1 / -0.0        -inf
#
# Exit status 0: it is still so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow-cpu==2.20.0
cat > "$folder/case.py" <<'PYTHON'
import math
import sys

import tensorflow as tf

one = {kind: tf.ones([], kind) for kind in (tf.float32, tf.float64)}


def inverse(zero):
    return float(tf.reshape(one[zero.dtype] / zero, []))


@tf.function
def traced():
    return tf.constant(-0.0, tf.float64)


tf.constant(0.0, tf.float64)
tf.constant(-0.0, tf.float32)
found = {
    "0.0 first, 1 / -0.0": inverse(tf.constant(-0.0, tf.float64)),
    "-0.0 first, 1 / 0.0": inverse(tf.constant(0.0, tf.float32)),
    "converted, 1 / -0.0": inverse(tf.convert_to_tensor(-0.0, tf.float64)),
    "in a list, 1 / -0.0": inverse(tf.constant([-0.0], tf.float64)),
    "in a function, 1 / -0.0": inverse(traced()),
}
for name, what in found.items():
    print(f"{name:<30} {what}")
sys.exit([*found.values()] != [math.inf, -math.inf, math.inf, -math.inf, -math.inf])
PYTHON
TF_CPP_MIN_LOG_LEVEL=2 "$folder/venv/bin/python" "$folder/case.py"
