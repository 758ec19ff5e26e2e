"""`horovod-topk bench`: what it is asked, and what it makes of what was measured."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from horovod_topk.cli.bench import gradients, nic, run
from horovod_topk.cli.bench.compute import Compute
from horovod_topk.cli.bench.figures import figures
from horovod_topk.cli.bench.gradients import GivenGradients, Weights
from horovod_topk.cli.bench.methods import DEFAULT, SETTINGS, method_of, parse_methods
from horovod_topk.cli.bench.picture import draw
from horovod_topk.cli.bench.ranks import HorovodRanks
from horovod_topk.cli.bench.runners import build, compressor
from horovod_topk.cli.bench.script import time_script
from horovod_topk.cli.bench.table import table
from horovod_topk.cli.files import check_writable
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.errors import TopKError
from horovod_topk.torch import TopKEF

pytestmark = pytest.mark.tools


class One:
    """One rank, alone: `horovod_topk.cli.bench.ranks.Ranks`."""

    rank = local_rank = 0
    size = local_size = hosts = 1

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def process_group(self, interface: str | None) -> AbstractContextManager[None]:
        return nullcontext()


ONE = One()
SPECS = [TensorSpec("c", (7,), "float32"), TensorSpec("b", (3, 5), "float32")]
SPECS += [TensorSpec("a", (4, 3), "float32")]


def method(name: str, *seconds: float, octets: float | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "what": name,
        "settings": {},
        "seconds": seconds,
        "cpu": seconds,
        "bytes": octets,
    }


def result(*methods: dict[str, Any], rate: int | None = 10**9) -> dict[str, Any]:
    return {
        "model": "resnet18",
        "elements": 1_000_000,
        "tensors": 3,
        "ranks": 4,
        "hosts": 4,
        "rate": rate,
        "compute": None,
        "idle parameters": 0,
        "counter": "packet scheduler",
        "methods": methods,
        "machine": {},
    }


# Methods


def test_commas_part_methods_and_settings() -> None:
    found = parse_methods("dense, topk:values=int8,ratio=0.001,ddp,topk-int4-sharded-0.02,none,ddp")
    assert [each.name for each in found] == [
        "dense",
        "topk:values=int8,ratio=0.001",
        "ddp",
        "topk-int4-sharded-0.02",
    ]
    assert found[1].settings == {"values": "int8", "ratio": 0.001}
    assert found[3].settings == {"values": "int4", "exchange": "sharded", "ratio": 0.02}
    assert {each.kind for each in found} == {"dense", "ddp", "topk"}


def test_compressors_of_ddp() -> None:
    (local,) = parse_methods("local+topk-int8")
    assert (local.is_local, local.is_ddp, local.settings) == (True, False, {"values": "int8"})
    assert "LocalSteps" in local.what
    found = parse_methods("ddp+topk-int8-sharded,ddp+QSGD(bits=2),topk-int8-sharded,ddp-fp16")
    assert [each.adapter for each in found] == ["ddp", "ddp", "torch", "torch"]
    assert found[0].settings == found[2].settings
    assert found[1].what == "torch DDP, QSGD"
    assert [each.is_ddp for each in found] == [True, True, False, True]
    (sharded,) = parse_methods("fsdp+topk-int8")
    assert (sharded.adapter, sharded.is_fsdp, sharded.is_ddp) == ("fsdp", True, False)
    assert method_of("fsdp-bf16").is_fsdp and not method_of("ddp").is_fsdp
    with pytest.raises(ValueError, match=r"'fsdp\+topk' in 'local\+fsdp\+topk' is no compressor"):
        method_of("local+fsdp+topk")
    with pytest.raises(ValueError, match=r"'fp16' in 'ddp\+fp16' is no compressor of this package"):
        method_of("ddp+fp16")


def test_settings_get_their_types() -> None:
    settings = method_of("topk:min_numel=0,clip_norm=0.5,exchange=auto").settings
    assert settings == {"min_numel": 0, "clip_norm": 0.5, "exchange": "auto"}
    found = method_of("topk:momentum=0.9,clip_norm=1")
    assert found.settings == {"momentum": 0.9, "clip_norm": 1.0}
    assert found.own_momentum == 0
    assert method_of("TopKEF(momentum=(0.9, 'nesterov'))").own_momentum == 0
    assert method_of("topk-plain-int8").settings == {"values": ("int8", "plain")}


def test_topk_is_the_default() -> None:
    found = method_of("topk")
    assert TopKEF(**found.settings).config == TopKEF().config
    assert found.own_momentum == 0.9
    assert method_of("topk:momentum=0").own_momentum == 0


def test_every_setting_that_is_offered_can_be_given() -> None:
    given = {"values": "int8", "exchange": "sharded", "selection": "sampled"}
    given |= {"residuals": "int8", "momentum": "0.9", "allocation": "adaptive"}
    for key in SETTINGS:
        assert key in method_of(f"topk:{key}={given.get(key, '1')}").settings


def test_any_compressor_is_written_as_in_python() -> None:
    text = "PowerSGD(rank=2,min_numel=0), topk:ratio=0.1,values=int8, OneBit,TopKEF(ratio=0.5)"
    found = parse_methods(text)
    assert [(each.compressor, each.settings) for each in found] == [
        ("PowerSGD", {"rank": 2, "min_numel": 0}),
        ("TopKEF", {"ratio": 0.1, "values": "int8"}),
        ("OneBit", {}),
        ("TopKEF", {"ratio": 0.5}),
    ]
    assert [each.what for each in found] == ["PowerSGD", "TopKEF", "OneBit", "TopKEF"]
    assert [each.own_momentum for each in found] == [0, 0.9, 0, 0.9]
    (own,) = parse_methods("TopKEF(ratio={'head.*': 'dense', 'emb*': 0.5},values='int8')")
    assert own.settings == {"ratio": {"head.*": "dense", "emb*": 0.5}, "values": "int8"}
    made = compressor(found[0]).config
    assert (made.rank, made.min_numel) == (2, 0)


def test_the_default_is_one_of_each_kind() -> None:
    assert {each.kind for each in parse_methods(DEFAULT)} >= {"dense", "fp16", "ddp", "powersgd"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dnse", "'dnse' is none of none, dense"),
        ("topk-int9", "'int9' in 'topk-int9' is neither a ratio nor one of float32"),
        ("topk:ratio=some", "ratio='some' is not a number"),
        ("topk:vlaues=int8", "Did you mean 'values'?"),
        ("topk:ratio=3", "ratio=3 is above 1"),
        ("topk-1.5", "outside (0, 1]"),
        ("topk:momentum=some", "momentum='some' is not a number"),
        ("topk:nesterov=1,momentum=0.9", "Pass a pair: momentum=(0.9, 'nesterov')"),
        ("topk:momentum=optimizer", "momentum='optimizer'"),
        ("topk:momentum=0.9,exchange=hierarchical", "momentum=0.9 with exchange='hierarchical'"),
        ("topk:warmup=1000", "write topk:ratio=0.25"),
        ("QSGD(warmup=[(9, 1.0)])", "write topk:ratio=0.25"),
        ("TopKEF(guard=None)", "leave guard= out"),
        ("QSDG(bits=2)", "there is no compressor 'QSDG'"),
        ("QSGD(bits=9)", "bits=9 is no whole number from 2 to 8"),
        ("topk-0.001-int8-int4", "'topk-0.001-int8-int4' has two of values, int8 and int4"),
        ("topk:ratio=0.1,ratio=0.2", "has two of ratio, 0.1 and 0.2: leave one out"),
        ("none", "names nothing to compare with"),
    ],
)
def test_a_method_that_is_none(text: str, message: str) -> None:
    with pytest.raises((ValueError, TopKError)) as caught:
        parse_methods(text)
    assert message in str(caught.value)


# The command line


def test_other_ranks_need_no_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other hosts folders may be missing."""
    monkeypatch.setenv("HOROVOD_RANK", "1")
    check_writable("--json", Path("/absent/x.json"))
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.raises(ValueError, match="there is no folder"):
        check_writable("--json", Path("/absent/x.json"))


def test_results_stay_when_their_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(json=tmp_path / "gone" / "x.json", picture=None)
    with pytest.raises(ValueError, match=r"x\.json: No such file .* The results are above"):
        run._report(args, result(method("none", 0.1), method("dense", 0.2)), [])
    assert "dense" in capsys.readouterr().out


def test_hosts_may_have_different_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on one and a fourth on another, as its first rank sees them."""
    place = {"rank": 0, "local_rank": 0, "size": 4, "local_size": 3, "cross_size": 2}
    monkeypatch.setattr(hvd, "init", lambda **_: None)
    for name, count in place.items():
        monkeypatch.setattr(hvd, name, lambda count=count: count)
    args = argparse.Namespace(model="m", script=None, compute=None, idle_parameters=0)
    assert run._result(args, HorovodRanks(), [], [], {})["hosts"] == 2


@pytest.mark.parametrize("code", ["0", "3", "'no data'"])
def test_a_script_that_ends_itself_too_early(code: str, tmp_path: Path) -> None:
    """Else it would end the measurement, with its own status and without a word."""
    path = tmp_path / "train.py"
    path.write_text(f"import sys\nsys.exit({code})\n")
    message = rf"ended by sys.exit\({code}\) after 0 steps of an hvd.DistributedOptimizer"
    with pytest.raises(ValueError, match=message):
        time_script(ONE, path, [], method_of("none"), 3, None)


def test_an_interface_without_an_address() -> None:
    assert nic.address(nic.LOOPBACK) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"'no0' has no IPv4 address .* of .*lo"):
        nic.address("no0")
    with pytest.raises(ValueError, match="Pass --interface"):
        HorovodRanks.process_group(ONE, None).__enter__()  # type: ignore[arg-type]


# Gradients


def test_backward_hands_out_gradients_from_the_last_layer_to_the_first() -> None:
    shared = Weights.of(SPECS, rank=0)
    model = GivenGradients(shared, seed=0, compute=None, idle=2)
    order: list[tuple[int, ...]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: order.append(tuple(p.shape)))
    model.draw()
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert order == [spec.shape for spec in SPECS]
    parameters = list(model.parameters())
    assert len(parameters) == 5
    assert sum(parameter.grad is None for parameter in parameters) == 2


def test_steps_differ_and_runners_do_not() -> None:
    shared = Weights.of(SPECS, rank=0)
    one, other = (GivenGradients(shared, seed=3, compute=None, idle=0) for _ in range(2))
    for _ in range(3):
        before = one.gradient(0)
        one.draw()
        other.draw()
        assert torch.equal(one.gradient(0), other.gradient(0))
        assert not torch.equal(one.gradient(0), before)


def test_units_for_fsdp2_have_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "UNIT", 100)
    model = GivenGradients(Weights.of(SPECS, rank=0), seed=0, compute=None, idle=0)
    units = model.units()
    assert [len([*unit.parameters()]) for unit in units] == [1, 2]
    units(torch.zeros(1, requires_grad=True)).sum().backward()
    for index, weight in enumerate(units.parameters()):
        assert torch.equal(weight.grad, model.gradient(index))


@pytest.mark.parametrize("kind", ["sleep", "cpu"])
def test_backward_takes_as_long_as_was_asked(kind: str) -> None:
    compute = Compute.of(f"{kind}:0.04")
    model = GivenGradients(Weights.of(SPECS, rank=0), seed=0, compute=compute, idle=0)
    began, occupied = time.perf_counter(), time.thread_time()
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert time.perf_counter() - began >= 0.04
    assert (time.thread_time() - occupied >= 0.04) == (kind == "cpu")


# Figures


def test_exchange_is_what_a_round_takes_beyond_the_step_without_one() -> None:
    found = figures(result(method("none", 0.1, 0.5, 0.1), method("dense", 1.1, 1.7, 2.1)))
    dense = found["dense"]
    assert (dense.step, dense.exchange) == pytest.approx((1.7, 1.2))
    assert (dense.least, dense.most, dense.cpu) == pytest.approx((1.0, 2.0, 1.2))


def test_factors_are_of_exchanges() -> None:
    methods = (
        method("none", 1.0, octets=10.0),
        method("dense", 3.0, octets=5000.0),
        method("topk", 1.1, octets=50.0),
        method("hidden", 0.9),
    )
    found = figures(result(*methods))
    assert found["topk"].faster(found["dense"]) == pytest.approx(20)
    assert found["topk"].fewer(found["dense"]) == pytest.approx(100)
    assert found["hidden"].faster(found["dense"]) is None
    assert found["hidden"].fewer(found["dense"]) is None
    assert found["topk"].faster(None) is None
    rows = {line.split()[0]: line for line in table(result(*methods)).splitlines()}
    assert rows["topk"].split()[-3:] == ["20.0x", "50", "100.0x"]


def test_fsdp2_is_beyond_its_own_step_without_exchange_between_nodes() -> None:
    methods = (
        method("none", 1.0),
        method("fsdp-none", 1.5),
        method("ddp", 3.0),
        method("fsdp", 2.5),
        method("fsdp+topk", 1.6),
    )
    exchanges = {name: each.exchange for name, each in figures(result(*methods)).items()}
    assert exchanges["fsdp-none"] == pytest.approx(0.5)
    assert (exchanges["fsdp"], exchanges["fsdp+topk"]) == pytest.approx((1.0, 0.1))
    rows = {line.split()[0]: line for line in table(result(*methods)).splitlines()}
    assert rows["ddp"].split()[-3] == "1.0x" and rows["fsdp+topk"].split()[-3] == "10.0x"
    assert "verdict: fsdp+topk exchanges 10.0x faster" in table(result(*methods))


def test_fsdp2_needs_nodes_of_equally_many_ranks() -> None:
    with pytest.raises(ValueError, match="fsdp shards within 2 nodes of equally many ranks"):
        run.check_nodes(parse_methods("ddp,fsdp"), ONE)
    run.check_nodes(parse_methods("ddp"), ONE)


def test_one_host_has_no_bytes_nor_have_hosts_whose_card_nobody_names() -> None:
    text = table(result(method("none", 0.1), method("dense", 0.2)) | {"counter": None, "hosts": 1})
    assert text.startswith("resnet18: 1,000,000 float32 in 3 tensors, 4 ranks on 1 host, 1 Gbit/s")
    assert "ranks share one host" in text
    text = table(result(method("none", 0.1), method("dense", 0.2)) | {"counter": None})
    assert "share one host" not in text and "pass it as --interface eth0" in text


@pytest.mark.parametrize(
    ("nccl", "named"),
    [("lo", "lo"), ("=lo,eth9", "lo"), ("^docker", None), ("absent", None), (None, None)],
)
def test_over_mpi_the_card_is_the_one_that_nccl_is_told(
    nccl: str | None, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if nccl is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert nic.interface_named(None, alone=False) == named
    assert nic.interface_named("eth1", alone=False) == "eth1"


def test_an_exchange_over_nodes_has_its_process_sets() -> None:
    assert run.process_sets(parse_methods("dense,topk-sharded")) is None
    assert run.process_sets(parse_methods("dense,topk-hierarchical")) == "dynamic"
    assert run.process_sets(parse_methods("topk:exchange=auto")) == "dynamic"


# The picture


def test_a_picture_of_several_bandwidths(tmp_path: Path) -> None:
    slow = result(method("none", 0.1), method("dense", 9.0), method("topk", 0.3), rate=10**8)
    fast = result(method("none", 0.1), method("dense", 1.0), method("topk", 0.2))
    draw(tmp_path / "made" / "picture.png", [fast, slow])
    assert (tmp_path / "made" / "picture.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="differ in more than bandwidth"):
        draw(tmp_path / "picture.png", [fast, slow | {"ranks": 2}])


# Verdict


def test_loopback_is_no_network() -> None:
    """Ranks of one host: a factor over dense says nothing about a cluster."""
    timed = method("none", 0.0), method("dense", 1.14), method("topk", 0.1)
    alone = table({**result(*timed), "hosts": 1}).splitlines()[-1]
    assert alone.startswith("verdict: none. All ranks share one host, and loopback is no network:")
    assert "11.4x says nothing about hosts" in alone
    apart = table(result(*timed)).splitlines()[-1]
    assert apart == "verdict: topk exchanges 11.4x faster than dense."
    slow = table(result(*timed[:2], method("topk", 2.28))).splitlines()[-1]
    assert slow == "verdict: topk exchanges 2.0x slower than dense."
    nothing = table(result(*timed[:2])).splitlines()[-1]
    assert nothing == "verdict: none, as dense and a compressor were not both timed."


@pytest.mark.parametrize("optimizer", ["sgd", "adam", None])
def test_the_optimizer_of_every_method(optimizer: str | None) -> None:
    model = GivenGradients(Weights.of(SPECS, rank=0), 0, None, 0)
    made = build(method_of("none"), model, 0, optimizer).optimizer
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW, None: torch.optim.SGD}
    assert type(made) is kinds[optimizer]
    assert made.defaults.get("momentum", 0) == (0.9 if optimizer == "sgd" else 0)
    told = table({**result(method("none", 0.0)), "optimizer": optimizer}).splitlines()[0]
    words = {"sgd": "SGD with momentum", "adam": "Adam or AdamW", None: "plain error feedback"}
    assert told.endswith(f", with {words[optimizer]}")
