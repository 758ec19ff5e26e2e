"""A compressor of the environment takes the place of the script's, and is parsed, never run."""

from __future__ import annotations

import importlib
import logging
import pickle
from typing import Any

import pytest

from horovod_topk import checkpoint, errors
from horovod_topk.config import DEFERRED
from horovod_topk.core.run import substitute
from horovod_topk.core.run.substitute import VARIABLE, parse
from horovod_topk.local import call
from horovod_topk.local.settings import Outer


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("TopKEF", "TopKEF()"),
        (" TopKEF(ratio=0.01) ", "TopKEF(ratio=0.01)"),
        ("TopKEF(momentum='auto', ratio=1e-3)", "TopKEF(momentum='auto', ratio=0.001)"),
        ("TopKEF(ratio={'8.*': 'dense'})", "TopKEF(ratio={'8.*': 'dense'})"),
        ('Dense(values="bfloat16")', "Dense(values='bfloat16')"),
        (
            "TopKEF(schedule=Accordion(critical=0.2))",
            "TopKEF(schedule=Accordion(profiles=(), critical=0.2, threshold=0.5, window=100))",
        ),
        ("none", "none"),
        ("fp16", "fp16"),
    ],
)
def test_is_written_as_it_is_read(text: str, written: str) -> None:
    assert str(parse(text)) == written
    assert str(parse(written)) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Top(ratio=0.01)", "there is no compressor 'Top'"),
        ("TopKEF(0.01)", "keyword arguments"),
        ("TopKEF(ratio=open('x'))", "ratio=open('x') is not a literal"),
        ("TopKEF(schedule=open('x'))", "schedule=open('x') is not a literal"),
        ("TopKEF(schedule=Accordion(window=open('x')))", "is not a literal"),
        ("__import__('os').system('true')", "is not a compressor"),
        ("TopKEF(ratio=0.01", "is not a compressor"),
        ("TopKEF(**{'ratio': 1})", "named once"),
        ("TopKEF(ratoi=0.01)", "Did you mean 'ratio'?"),
        ("TopKEF(ratio=7)", "ratio=7 is above 1"),
        ("", "is not a compressor"),
    ],
)
def test_refuses_what_is_no_compressor(text: str, message: str) -> None:
    with pytest.raises(errors.TopKError) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            "LocalSteps(every=10)",
            "LocalSteps(TopKEF(ratio=0.015625, values='int2', momentum=0), every=10)",
        ),
        (
            " LocalSteps(TopKEF(ratio=0.02, momentum=0), every='60s', decay=0.95)",
            "LocalSteps(TopKEF(ratio=0.02, momentum=0), every='60s', decay=0.95)",
        ),
        (
            "LocalSteps('diloco', every=8)",
            "LocalSteps(Dense(), every=8, outer="
            + repr(Outer(lr=0.7, momentum=0.9, form="nesterov", mean="ranks"))
            + ")",
        ),
        ("TopKEF(ratio=0.01)", "TopKEF(ratio=0.01)"),
        ("none", "none"),
    ],
)
def test_local_steps_are_written_as_they_are_read(text: str, written: str) -> None:
    assert str(call.parse(text)) == written
    assert str(call.parse(written)) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("LocalSteps(TopKEF, 30)", "have to be named"),
        ("LocalSteps(none, every=30)", "Horovod's own compression"),
        ("LocalSteps('diloko')", "diloko"),
        ("LocalSteps(Dense, evry=30)", "LocalSteps has no setting 'evry'"),
        ("LocalSteps(Dense, every=0)", "every=0"),
        ("LocalSteps(Dense, outer=open('x'))", "is not a literal"),
        ("LocalSteps(Dense, outer=Outer(mean='all'))", "mean='all' is not one of the choices"),
        ("LocalSteps(Dense, outer=Outer(rate=2))", "unexpected keyword argument 'rate'"),
        ("LocalSteps(Dense(ratio=7))", "ratio"),
        ("LocalSteps(open('x'))", "is not a compressor"),
    ],
)
def test_refuses_what_are_no_local_steps(text: str, message: str) -> None:
    with pytest.raises(errors.TopKError) as error:
        call.parse(text)
    assert message in str(error.value)


@pytest.fixture(params=["torch", "tensorflow"])
def adapter(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(f"horovod.{request.param}")
    return importlib.import_module(f"horovod_topk.{request.param}")


@pytest.fixture(autouse=True)
def _anew() -> None:
    substitute.announce.cache_clear()


def test_the_scripts_compressor_becomes_what_is_asked_for(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "Dense(values='bfloat16')")
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        made = adapter.TopKEF(ratio=0.5, values="int8")
    assert repr(made) == "Dense(values='bfloat16')"
    assert made.config.values == "bfloat16"
    assert "takes the place of the script's TopKEF" in caplog.text
    assert repr(adapter.Compressor.asked(adapter.TopKEF)) == repr(made)
    assert adapter.Compressor.asked(made) is made
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)


def test_settings_of_the_script_are_replaced_as_a_whole(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "TopKEF(ratio=0.2)")
    made = adapter.TopKEF(values="int8", momentum="auto")
    assert (made.config.ratio, made.config.values) == (0.2, "int4")
    assert made.deferred == dict.fromkeys(DEFERRED.keys() - {"ratio"}, "auto")


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_horovod_serves_the_optimizer(
    adapter: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = adapter.TopKEF()
    monkeypatch.setenv(VARIABLE, name)
    assert adapter.Compressor.asked(adapter.TopKEF) is None
    assert adapter.Compressor.asked(made) is None
    framework = importlib.import_module(adapter.__name__.removeprefix("horovod_topk."))
    ones = framework.ones([3])
    compressed, context = adapter.TopKEF.compress(ones)
    assert compressed.dtype == (framework.float16 if name == "fp16" else ones.dtype)
    assert adapter.TopKEF.decompress(compressed, context).dtype == ones.dtype


def test_a_script_can_ask_for_a_state_that_is_not_there(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    made = adapter.TopKEF()
    monkeypatch.setenv(VARIABLE, "none")
    for state in (made, adapter.TopKEF.of(object())):
        assert not state.stats().active
        assert "exchanged without this package" in state.stats().skipped["*"]
        assert state.state_dict() == {}
        state.load_state_dict({})
        state.on_step(print)
        state.reset()
        state.set_ratio(None)
    checkpoint.save(tmp_path, adapter.TopKEF.of(object()))


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("asked", ["none", "TopKEF()"])
def test_what_the_optimizer_does_without_is_not_dropped(
    adapter: Any, settings: dict[str, Any], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = adapter.TopKEF(**settings)
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(errors.ConfigError, match=next(iter(settings))):
        adapter.Compressor.asked(made) if asked == "none" else adapter.TopKEF(**settings)


def test_the_variable_is_checked_when_it_is_used(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "TopK")
    with pytest.raises(errors.ConfigError, match="there is no compressor"):
        adapter.TopKEF()
