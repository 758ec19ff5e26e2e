"""One base class, one subclass a cause; messages in one form; errors survive a process boundary."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest

from horovod_topk import errors
from horovod_topk.errors import ConfigError, TopKError

SUBCLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and value is not TopKError
]
assert len(SUBCLASSES) >= 15


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_every_error_is_ours_and_pythons(kind: type[TopKError]) -> None:
    """A caller may catch all of ours, or the builtin that fits."""
    assert issubclass(kind, TopKError)
    assert issubclass(kind, (ValueError, TypeError, LookupError, RuntimeError, ImportError))
    assert kind.__doc__


@pytest.mark.parametrize("kind", [TopKError, *SUBCLASSES])
@pytest.mark.parametrize("tensor", [None, "layer1.weight"])
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_errors_can_be_sent_to_another_process(
    kind: type[TopKError], tensor: str | None, duplicate: object
) -> None:
    error = kind("3 was met", cure="Pass 2", tensor=tensor)
    again = duplicate(error)  # type: ignore[operator]
    assert type(again) is kind
    assert (again.problem, again.cure, again.tensor) == ("3 was met", "Pass 2", tensor)
    assert str(again) == str(error)


def test_messages_name_the_tensor_the_problem_and_the_cure() -> None:
    error = TopKError("7 is above 1", cure="Pass 0.7", tensor="conv.bias")
    assert str(error) == "tensor 'conv.bias': 7 is above 1. Pass 0.7."
    assert str(TopKError("7 is above 1", cure="Pass 0.7")) == "7 is above 1. Pass 0.7."


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_spellings_of_older_versions_name_what_to_write_instead(framework: str) -> None:
    pytest.importorskip(f"horovod.{framework}")
    topk = importlib.import_module(f"horovod_topk.{framework}").TopKEF
    with pytest.raises(ConfigError, match=r"momentum='optimizer' .* Leave momentum= out: 'auto'"):
        topk(momentum="optimizer")
    with pytest.raises(ConfigError, match=r"'velocity_kept'.* always masks .* leave velo"):
        topk(momentum=0.9, velocity_kept=0.5)
    with pytest.raises(ConfigError, match=r"compact\(\) does not exist any more. Write TopKEF\(\)"):
        topk.compact(values="int8")
