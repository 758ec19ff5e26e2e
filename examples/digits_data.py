"""scikit-learn's handwritten digits (1,797 images of 8 x 8) and their split, as NumPy arrays.

450 images are held out, 300 are kept for choosing settings, and the rest is for training. The split
is the same in every framework, for every seed and every number of ranks.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

HELD_OUT = 450
VALIDATION = 300


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 8, 8], float32 in [0, 1], and labels [N], int64, of a split."""
    images, labels = load_digits(return_X_y=True)
    order = shuffled(len(labels))
    held_out, validation, training = np.split(order, [HELD_OUT, HELD_OUT + VALIDATION])
    rows = {"training": training, "validation": validation, "held-out": held_out}[split]
    return (images[rows] / 16).astype(np.float32).reshape(-1, 8, 8), labels[rows]


def shuffled(count: int) -> np.ndarray:
    """The numbers below `count` in the order that `torch.randperm` gives them with seed 0.

    The first published figures were made with PyTorch's order. Its CPU generator is the Mersenne
    Twister that NumPy's RandomState is, and its shuffle the one of Fisher and Yates.
    """
    draws = np.random.RandomState(0).randint(2**32, size=count, dtype=np.uint32)
    order = np.arange(count)
    for i, draw in enumerate(draws):
        j = i + draw % (count - i)
        order[[i, j]] = order[[j, i]]
    return order
