"""Learning rates, which TensorFlow's adapter does not follow."""

from __future__ import annotations

import pytest

from horovod_topk.errors import ConfigError

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")


def test_following_them_is_refused() -> None:
    from horovod_topk.tensorflow import TopKEF

    with pytest.raises(ConfigError, match=r"for PyTorch alone.*Leave follow_lr= out"):
        TopKEF(follow_lr=True)
    assert not TopKEF(follow_lr=False).config.follow_lr
