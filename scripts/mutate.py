"""Break the package on purpose, one line at a time, and print which tests notice.

    python scripts/mutate.py [--baseline] [--only WORD] > mutations.txt

Each mutation replaces a text wherever it is in the package, in a copy of the repository, and runs
the tests that are expected to notice: half an hour in all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
LIMIT = 240  # seconds for the tests of one mutation; they take about 20 on an idle machine
FAILED = 1  # pytest's exit code, and a launcher's, if tests fail

# Runs a case file on real ranks, and leaves no process of them behind.
LAUNCH = """\
import sys, tempfile
from pathlib import Path
import launcher

controller, size, case, *more = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    done = launcher.launch_ranks(
        [launcher.HERE / case], size=int(size), controller=controller, folder=Path(folder),
        limit=120.0, arguments=["-x", *more], tier="all",
        settings={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
    )
for each in done.failures():
    print("FAILED", each.case)
print(done.output[-300:])
sys.exit(0 if done.returncode == 0 and not done.failures() else 1)
"""


class Mutation(NamedTuple):
    """One broken line.

    Attributes:
        room: part of the package.
        text: what is replaced, in each place where it stands.
        put: what stands there instead.
        tests: pytest's arguments; after "gloo 2:" or "torchrun 2:", a case file on real ranks.
    """

    room: str
    text: str
    put: str
    tests: str


PROPERTIES = "tests/properties/test_"
MUTATIONS = (
    Mutation(
        "plan",
        "return (part - zlib.crc32(name.encode())) % parts",
        "return part % parts",
        "tests/golden",
    ),
    Mutation(
        "plan",
        "return -(-offset // alignment) * alignment",
        "return offset // alignment * alignment",
        "tests/golden",
    ),
    Mutation(
        "plan",
        "most = max(plan.layout.payload_bytes for plan in plans)",
        "most = min(plan.layout.payload_bytes for plan in plans)",
        f"tests/unit/test_plan.py {PROPERTIES}owners.py tests/contract/test_methods.py",
    ),
    Mutation(
        "plan",
        "own = tuple((name, max(each, ratio)) for name, each in self.ratios or ())",
        "own = tuple((name, min(each, ratio)) for name, each in self.ratios or ())",
        "tests/unit/test_groups_ratios.py",
    ),
    Mutation(
        "state",
        "return _share(reduction, before) / _share(reduction, after)",
        "return _share(reduction, after) / _share(reduction, before)",
        f"{PROPERTIES}reshard.py {PROPERTIES}elastic.py",
    ),
    Mutation(
        "state",
        "self._candidate.copy(start, stop, self._residual, ops)",
        "pass",
        f"{PROPERTIES}commit_by_tensor.py",
    ),
    Mutation(
        "state",
        "factors[name] = now / unit",
        "factors[name] = unit / now",
        f"{PROPERTIES}learning_rates.py",
    ),
    Mutation(
        "codec",
        "subtract_at(candidate, each.index, each.values)",
        "subtract_at(candidate, None, candidate)",
        f"{PROPERTIES}conservation.py",
    ),
    Mutation(
        "codec",
        "layout, flags = bucket.layout, (1 << len(bucket.gradients)) - 1",
        "layout, flags = bucket.layout, 0",
        f"{PROPERTIES}announcing.py {PROPERTIES}owners.py {PROPERTIES}ranks_agree.py",
    ),
    Mutation(
        "codec",
        "compensate(candidate, rest, candidate)",
        "numel(rest)",
        f"{PROPERTIES}conservation.py tests/unit/test_tracker.py",
    ),
    Mutation(
        "exchange",
        "gain = gain * (1 / ranks)",
        "gain = gain * 1.0",
        f"{PROPERTIES}against_reference.py",
    ),
    Mutation(
        "exchange",
        "scale = 1 / ranks if arrive.reduction",
        "scale = 1.0 if arrive.reduction",
        f"{PROPERTIES}owners.py tests/contract/test_methods.py",
    ),
    Mutation(
        "exchange",
        "if len({fingerprint for fingerprint, *_ in seen}) > 1:",
        "if len({fingerprint for fingerprint, *_ in seen}) > 2:",
        f"{PROPERTIES}agreement.py",
    ),
    Mutation(
        "exchange",
        "at = (owner * nodes + row) * size",
        "at = (row * owners + owner) * size",
        f"{PROPERTIES}owners.py tests/contract/test_methods.py",
    ),
    Mutation(
        "run",
        "return self._end(committed=False)",
        "return self._end(committed=True)",
        f"{PROPERTIES}commit_or_rollback.py",
    ),
    Mutation(
        "run",
        "known = counter.lineage + self._left_out",
        "known = counter.lineage",
        f"tests/unit/test_facts.py {PROPERTIES}commit_by_tensor.py",
    ),
    Mutation(
        "run",
        "kept = [*storage.residuals, *storage.owned, *in_units]",
        "kept = [*storage.residuals, *in_units]",
        f"{PROPERTIES}commit_by_tensor.py",
    ),
    Mutation(
        "control",
        "if 2 * len(slow) <= len(verdicts):",
        "if 2 * len(slow) < len(verdicts):",
        "tests/unit/test_guard.py",
    ),
    Mutation(
        "control",
        "if ratio not in self.levels or ratio in (DENSE, self._config.ratio):",
        "if ratio not in self.levels:",
        f"{PROPERTIES}schedule.py tests/unit/test_schedules.py",
    ),
    Mutation(
        "methods",
        'work.following["q"] = q',
        'work.following["q"] = work.state["q"]',
        f"{PROPERTIES}powersgd.py",
    ),
    Mutation(
        "methods",
        "if self.values == AUTO:",
        "if False:",
        "tests/unit/test_config.py",
    ),
    Mutation(
        "updates",
        "return momentum * of.momentum + (1.0 - phi * of.cut) * g",
        "return momentum * of.momentum + (1.0 - phi) * g",
        "tests/unit/test_updates.py",
    ),
    Mutation(
        "updates",
        "where(grown < 1.0, grown, 1.0)",
        "where(grown < 1.0, 0.0, 1.0)",
        "tests/unit/test_updates.py",
    ),
    Mutation(
        "updates",
        "return before + (norm - before) * NORM_RATE",
        "return norm",
        "tests/unit/test_tracker.py",
    ),
    Mutation(
        "ops",
        "return blocks * SHARD_BLOCK + (rest if whole % parts == first else 0)",
        "return blocks * SHARD_BLOCK",
        f"{PROPERTIES}owners.py",
    ),
    Mutation(
        "ops",
        "return torch.where(exceeds, edge - g, residual), rest",
        "return residual, rest",
        "tests/contract/test_ops.py",
    ),
    Mutation(
        "kernels",
        "return None if wrong < 0 else divmod(wrong, self.tensors)",
        "return None",
        f"tests/kernels/test_native.py {PROPERTIES}damaged_payloads.py",
    ),
    Mutation(
        "kernels",
        "if library.topkef_digest().decode() != digest():",
        "if False:",
        "tests/kernels/test_native.py",
    ),
    Mutation(
        "torch",
        "and gradient._version == seen.version",
        "and True",
        "tests/unit/test_changed_gradients.py",
    ),
    Mutation(
        "torch",
        "if slot.exchanged is None or ordinal in step.sent:",
        "if slot.exchanged is None:",
        "gloo 2: ranks/case_steps.py",
    ),
    Mutation(
        "torch",
        "if is_complete:",
        "if is_complete or fired:",
        "gloo 2: ranks/case_steps.py",
    ),
    Mutation(
        "ddp",
        "buffer.fill_(math.nan)",
        "buffer.fill_(0.0)",
        "torchrun 2: ranks/case_ddp.py",
    ),
    Mutation(
        "ddp",
        "if hooks in untouched and hooks.buckets.present() == untouched[hooks]:",
        "if False:",
        "torchrun 2: ranks/case_several.py",
    ),
    Mutation(
        "tensorflow",
        "known = self._committed.read_value(), decided, self._asked.read_value()",
        "known = self._committed.read_value(), decided, -1",
        "tests/unit/test_tf_schedule.py",
    ),
    Mutation(
        "tensorflow",
        "tf.cond(sound, commit, lambda: None)",
        "commit()",
        "gloo 2: tensorflow_ranks/case_tf_as_simulated.py -k majority-graph",
    ),
    Mutation(
        "tensorflow",
        "total += rows[rank]",
        "total = rows[rank]",
        "gloo 4: tensorflow_ranks/case_tf_as_simulated.py -k hierarchical-eager",
    ),
    Mutation(
        "checkpoint",
        "if hashlib.sha256(zeroed).hexdigest().encode() != match[1]:",
        "if not zeroed:",
        "tests/unit/test_checkpoint.py tests/unit/test_malformed_shards.py",
    ),
    Mutation(
        "elastic",
        "residuals[name] = mine + share * self._talk.beside(e, mine)",
        "residuals[name] = mine",
        f"{PROPERTIES}elastic.py",
    ),
    Mutation(
        "elastic",
        'if fact["clock"][0] == committed:',
        "if True:",
        f"{PROPERTIES}elastic.py",
    ),
    Mutation(
        "config",
        "0.0 < float(norm) < math.inf",
        "0.0 <= float(norm) < math.inf",
        "tests/unit/test_config.py",
    ),
    Mutation(
        "config",
        "0.25**i) for i in range(1, count + 1))",
        "0.5**i) for i in range(1, count + 1))",
        "tests/unit/test_warmup.py",
    ),
)


def main() -> None:
    """Print a line for each mutation, and how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", action="store_true", help="first run the tests as they are")
    parser.add_argument("--only", default="", help="mutations with this word in room or text")
    asked = parser.parse_args()
    chosen = [each for each in MUTATIONS if asked.only in each.room + each.text]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build"))
        if asked.baseline:
            for tests in dict.fromkeys(each.tests for each in chosen):
                code, ends = noticed(copy, tests)
                print(f"{'unbroken':11} {'passes' if code == 0 else 'FAILS':8} {tests}: {ends}")
        found = [tried(copy, each) for each in chosen]
    print(f"{found.count('caught')} of {len(found)} caught", flush=True)


def tried(copy: Path, mutation: Mutation) -> str:
    """Break a line of the copy, run its tests, and repair it; print and return what happened."""
    every = {path: path.read_text() for path in copy.glob("horovod_topk/**/*.py")}
    broken = {path: text for path, text in every.items() if mutation.text in text}
    for path, text in broken.items():
        path.write_text(text.replace(mutation.text, mutation.put))
    code, ends = noticed(copy, mutation.tests) if broken else (-1, "")
    for path, text in broken.items():
        path.write_text(text)
    word = {0: "MISSED", FAILED: "caught", None: "caught", -1: "gone"}.get(code, f"rc {code}")
    where = ", ".join(str(path.relative_to(copy / "horovod_topk")) for path in broken)
    print(f"{mutation.room:11} {word:8} {where}: {mutation.text} -> {mutation.put} | {ends}")
    sys.stdout.flush()
    return word


def noticed(copy: Path, tests: str) -> tuple[int | None, str]:
    """Run tests of the copy; return the exit code, None after `LIMIT`, and the first failure."""
    launch, _, cases = tests.rpartition(":")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *cases.split()]
    if launch:
        command = [sys.executable, "-c", LAUNCH, *launch.split(), *cases.split()]
    folders = copy, copy / "tests" / "distributed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return None, "time limit"
    lines = (done.stdout + done.stderr).splitlines()
    marked = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (marked or lines or [""])[0 if marked else -1][:160]


if __name__ == "__main__":
    main()
