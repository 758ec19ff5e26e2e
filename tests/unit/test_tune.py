"""`horovod-topk tune`: its space, what a budget allows, the search, the verdict, its output."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")
pytest.importorskip("scipy")
pytest.importorskip("tqdm")

from horovod_topk import cli
from horovod_topk.cli.compare.curves import Metric
from horovod_topk.cli.compare.records import DONE, STOPPED, Cell, Point, Record, Store
from horovod_topk.cli.compare.settings import CompareSettings
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.tune.report import frontier, lines, paste, verdict
from horovod_topk.cli.tune.search import Budget, GoOn, Runs, Search
from horovod_topk.cli.tune.space import DEFAULT, Cost, Costs, Setting, fit_to, settings
from horovod_topk.cost import machine as machines
from horovod_topk.cost.step import Training
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.local.call import parse
from study.workloads import workload

pytestmark = pytest.mark.tools

LOSS = Metric("loss", higher_is_better=False)
EVERY = list(settings(local=True))
STEPS = 100
DENSE = Cost(1000.0, 1000.0)
Worse = Callable[[str, int], float]  # share of dense's loss that a compressor adds with a seed


def costs() -> dict[Setting, Cost]:
    """Bytes in the order of ratios; local steps send less."""
    found = {}
    for setting in EVERY:
        sent = 2000 * dict(setting.values).get("ratio", 0.2) / setting.every
        found[setting] = Cost(sent, sent)
    return found


class Script:
    """Makes runs whose loss is known; counts them."""

    def __init__(self, worse: Worse) -> None:
        self.worse, self.texts = worse, list[tuple[str, int]]()
        self.breaks_after = math.inf

    def train(self, _: CompareSettings, cell: Cell, go_on: GoOn) -> Record:
        if len(self.texts) >= self.breaks_after:
            raise KeyboardInterrupt
        self.texts.append((cell.compressor, cell.seed))
        share = 0.0 if cell.compressor == "none" else self.worse(cell.compressor, cell.seed)
        points = []
        for step in (20, 40, 60, 80, 100):
            points.append(Point(step, step / 10, {"loss": (1 + share) * 10 / step}))
            if step < STEPS and not go_on(points[-1]):
                return Record(cell, STOPPED, points=tuple(points))
        return Record(cell, DONE, points=tuple(points))


def search(script: Script, folder: Path, budget: Budget, runs: int = 40, seeds: int = 3) -> Search:
    file = folder / "train.py"
    file.write_text("import horovod.torch as hvd")
    asked = CompareSettings(script=file, compressors={}, seeds=tuple(range(seeds)))
    made = Runs(asked, Store(folder / "runs.jsonl"), script.train)
    return Search(costs(), DENSE, budget, made, LOSS, asked.seeds, runs * STEPS)


def by_ratio(text: str, seed: int) -> float:
    """More elements are better, and int8 is as good as int4."""
    asked: Any = parse(text)
    own = getattr(asked, "compressor", asked).settings
    lost = 0.05 / (own.get("ratio", 0.02) / 0.02) if text.startswith("TopKEF") else 0.5
    return lost + 0.001 * seed


# The space


def test_every_setting_is_one_that_compare_reads_and_the_default_has_no_arguments() -> None:
    assert DEFAULT in EVERY and DEFAULT.text == "TopKEF()"
    texts = [setting.text for setting in EVERY]
    assert len({*texts}) == len(texts) == len({setting.title for setting in EVERY})
    assert all(str(parse(text)) == text for text in texts)
    assert all(setting.every == 1 for setting in settings(local=False))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "none"])
def test_bytes_and_times_are_those_of_plan(optimizer: str) -> None:
    specs, nodes = specs_of("resnet18"), nodes_of(8, 1)
    machine = machines.read(machines.REFERENCE)
    found = Costs(specs, nodes, 600, fit_to(optimizer), machine, Training(0.05))
    dense, default = found.dense, found.of("TopKEF()")
    assert dense.bytes == 2 * 7 / 8 * 4 * sum(math.prod(each.shape) for each in specs)
    assert default.seconds is not None and dense.seconds is not None
    assert default.seconds < dense.seconds and default.later < dense.bytes / 30
    assert default.bytes > default.later if optimizer != "none" else default.bytes == default.later
    local = found.of("LocalSteps(TopKEF(ratio=0.02, values='int4', momentum=0), every=10)")
    assert local.bytes == pytest.approx(default.later / 10, rel=0.05)


# Budgets


def test_what_the_budget_leaves_out_is_never_run(tmp_path: Path) -> None:
    script = Script(by_ratio)
    found = search(script, tmp_path, Budget(fewer=20.0))
    found.run()
    sent = {setting.text: cost.bytes for setting, cost in costs().items()}
    assert all(20 * sent[text] <= 1000 for text, _ in script.texts if text != "none")
    assert found.best is not None and dict(found.best.values)["ratio"] == 0.02
    assert found.runs.steps <= 40 * STEPS


def test_a_limit_of_seconds_needs_a_network() -> None:
    assert not Budget(seconds=0.1).allows(DENSE, DENSE)
    assert Budget(seconds=0.1).allows(Cost(1.0, 1.0, 0.1), DENSE)
    assert not Budget(fewer=2.0, seconds=0.1).allows(Cost(501.0, 1.0, 0.1), DENSE)


def test_the_fewest_bytes_within_a_limit_of_quality(tmp_path: Path) -> None:
    script = Script(by_ratio)
    found = search(script, tmp_path, Budget(lost=0.11))
    found.run()
    assert found.best is not None and dict(found.best.values)["ratio"] == 0.01
    best, sentence = verdict(found)
    assert best == found.best and "2.00 times fewer bytes a step than the default" in sentence
    tried = [found.cost(each) for each in found.tried if found.is_good(each)]
    assert tried == sorted(tried, reverse=True)  # what costs more than a good one is not run


def test_runs_that_do_badly_are_stopped(tmp_path: Path) -> None:
    found = search(Script(by_ratio), tmp_path, Budget(fewer=1.0), runs=30)
    found.run()
    ends = {each.status: each.points[-1].step for each in found.runs.records}
    assert ends == {DONE: 100, STOPPED: 40}


def test_a_quality_that_nothing_keeps(tmp_path: Path) -> None:
    found = search(Script(lambda *_: 0.5), tmp_path, Budget(lost=0.01))
    found.run()
    assert found.best is None and "Do not compress" in verdict(found)[1]


# The verdict


def test_the_default_was_as_good_where_seeds_do_not_agree(tmp_path: Path) -> None:
    def noisy(text: str, seed: int) -> float:
        return 0.0 if text == "TopKEF()" else (-0.1, 0.12, -0.05)[seed]

    found = search(Script(noisy), tmp_path, Budget(fewer=10.0))
    found.run()
    chosen, sentence = verdict(found)
    assert chosen == DEFAULT and "the default was as good" in sentence


def test_a_better_setting_is_named_and_pasted(tmp_path: Path) -> None:
    found = search(Script(by_ratio), tmp_path, Budget(fewer=4.0), runs=60)
    found.run()
    text = "\n".join(lines(found, tmp_path / "train.py", 1.0))
    assert "than the default" in text and "compression=TopKEF(ratio=0.1" in text
    assert max(map(len, text.splitlines())) <= 100
    shown = frontier(found)
    assert [found.cost(each) for each in shown] == sorted(found.cost(each) for each in shown)


@pytest.mark.parametrize(
    ("script", "module", "line"),
    [
        (
            "import horovod.torch as hvd",
            "torch",
            "hvd.DistributedOptimizer(..., compression=TopKEF)",
        ),
        ("import keras", "tensorflow", "hvd.DistributedOptimizer(..., compression=TopKEF)"),
        ("DistributedDataParallel(model)", "ddp", "TopKEF().attach(model, optimizer)"),
        ("fully_shard(m)", "fsdp", 'TopKEF().attach(model, optimizer, between=mesh["replicate"])'),
    ],
)
def test_the_line_is_for_the_scripts_framework(
    script: str, module: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    found = paste(DEFAULT, tmp_path / "train.py")
    assert found == (f"from horovod_topk.{module} import TopKEF", line)


# A second start


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    first, second = Script(by_ratio), Script(by_ratio)
    first.breaks_after = 6
    broken = search(first, tmp_path, Budget(fewer=10.0))
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    broken.choose()
    assert broken.best is not None
    whole, again = search(second, tmp_path, Budget(fewer=10.0)), Script(by_ratio)
    whole.run()
    assert not {*first.texts} & {*second.texts}
    (tmp_path / "other").mkdir()
    alone = search(again, tmp_path / "other", Budget(fewer=10.0))
    alone.run()
    assert again.texts == first.texts + second.texts and alone.best == whole.best
    assert alone.runs.seconds == whole.runs.seconds


def test_a_stopped_run_is_made_again_where_more_of_it_is_needed(tmp_path: Path) -> None:
    script = Script(by_ratio)
    made = search(script, tmp_path, Budget(fewer=1.0)).runs
    assert made("TopKEF(ratio=0.1)", 0, lambda point: point.step < 40).status == STOPPED
    again = search(script, tmp_path, Budget(fewer=1.0)).runs
    assert again("TopKEF(ratio=0.1)", 0, lambda point: point.step < 20).points[-1].step == 20
    more = search(script, tmp_path, Budget(fewer=1.0)).runs
    assert more("TopKEF(ratio=0.1)", 0).status == DONE
    assert script.texts.count(("TopKEF(ratio=0.1)", 0)) == 2


# The command

SETTINGS = f"""
script = "{workload.__code__.co_filename}"
simulated = true
ranks = 2
metric = "loss"
options = {{ task = "digits", optimizer = "momentum", lr = 0.05, steps = 20 }}
compressors = {{ default = "TopKEF()" }}
"""


def test_a_search_on_simulated_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "tune.toml"
    file.write_text(SETTINGS)
    words = ["tune", str(file), "--bytes", "10x", "--runs", "6", "--seeds", "1"]
    words += ["--out", str(tmp_path / "runs")]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "verdict: " in printed and "from horovod_topk.torch import " in printed
    made = sorted((tmp_path / "runs").glob("*.json"))
    records = [json.loads(path.read_text()) for path in made]
    default = next(each for each in records if each["cell"]["compressor"] == "TopKEF()")
    assert f" {default['sent_bytes']:,.0f} " in printed  # known before it ran, to the byte
    assert cli.main(words) == 0
    assert "0 of the runs were made now" in capsys.readouterr().out.replace("\n", " ")
    assert sorted((tmp_path / "runs").glob("*.json")) == made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what may it cost? Give --bytes 50x"),
        (["--bytes", "50"], "--bytes '50': give a number above 0 with its unit, such as 50x"),
        (["--quality", "0%"], "--quality '0%': give a number above 0"),
        (["--step-time", "9ms"], "give --bandwidth 1gbit and --compute 60ms"),
        (["--bytes", "50x"], "Give --model shapes.json"),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    assert cli.main(["tune", str(tmp_path / "train.py"), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_script_of_the_page_runs_by_itself() -> None:
    script = Path(__file__).parents[2] / "scripts" / "study" / "tune.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert "--searches" in done.stdout, done.stderr
