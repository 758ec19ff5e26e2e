"""docs/crashes.md, from docs/results/crashes.json."""

from __future__ import annotations

import statistics
from typing import Any

from study.markdown import filled, table

PAGE = """\
# Killed ranks

<!-- Written by `make crashes` from docs/results/crashes.json. Change scripts/crash instead. -->

What an elastic job loses when its ranks are killed. Up to {hosts} real ranks on one machine train
the digits, each under a host name of its own. SIGKILL ends one rank at a time, at a random moment
of a step or a commit, {least:g} seconds or more after the last kill, while all ranks train. Horovod
then starts another rank. Each seed is also trained by two ranks without kills.

{verdict}

- The job returned to a commit {returns} times. In {same} returns it went on with the weights of the
  commit (compared: the sum of their absolute values).
- It repeated the steps since that commit: {worst} at most, {median:g} in the median. {every} steps
  lie between two commits.
- In {whole} returns the mean of all ranks' residuals was {unchanged} (compared: every 101st
  element).
- A residual is lost if its rank dies between the other ranks' commit and its own: that happened in
  {partly} returns.

{jobs}

"Points" is the held-out accuracy with kills minus that without.

Settings: `examples/pytorch_digits.py`'s network, SGD with momentum, learning rate 0.1; plain error
feedback at ratio 0.01 in float32,
`horovod_topk.torch.elastic.TorchState` and `TopKEF(commit_dir=...)`. A step has the same examples
with any number of ranks. Horovod 0.28 itself does not survive a rank that is killed while ranks are
about to meet: the ranks that wait for it abort. So no rank is killed at that moment.

{machine}. Command: `make crashes`.
"""


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    settings, environment, jobs = found["settings"], found["environment"], found["jobs"]
    returns = [each for job in jobs for each in job["disturbed"]["returns"]]
    redone = [each["reached"] - each["resumed"] for each in returns]
    whole = [each for each in returns if not each["lost"]]
    least, _ = settings["wait"]
    return PAGE.format(
        every=settings["commit_every"],
        hosts=settings["hosts"],
        least=least,
        machine=f"{environment['cpu']}, {environment['cores']} shared cores, Python "
        f"{environment['python']}, PyTorch {environment['torch']}, Horovod "
        f"{environment['horovod']} on Gloo, {environment['date']}",
        jobs=_table(jobs),
        returns=len(returns),
        worst=max(redone, default=0),
        median=statistics.median(redone or [0]),
        same=sum(each["same_weights"] for each in returns),
        whole=len(whole),
        partly=len(returns) - len(whole),
        unchanged=_unchanged(max((each["owed_apart"] or 0.0 for each in whole), default=0.0)),
        verdict=_verdict(jobs),
    )


def _unchanged(apart: float) -> str:
    """How near the residuals are to what they were, in units of their largest element."""
    within = f", within {apart:.1g} of its largest element" if apart else ", without any difference"
    return f"what it had been at the commit{within}"


def _table(jobs: list[dict[str, Any]]) -> str:
    rows = []
    for job in jobs:
        calm, wild = job["undisturbed"], job["disturbed"]
        rows.append(
            [
                str(calm["seed"]),
                f"{calm['steps']:,}",
                f"{100 * calm['accuracy']:.2f}%",
                str(wild["kills"]),
                f"{100 * wild['accuracy']:.2f}%",
                f"{100 * (wild['accuracy'] - calm['accuracy']):+.2f}",
                str(wild["lost_ranks"]),
                "yes" if wild["ranks_agree"] else "**no**",
            ]
        )
    return table(
        [
            "seed",
            "steps",
            "accuracy without kills",
            "kills",
            "accuracy with kills",
            "points",
            "residuals lost",
            "all ranks end equal",
        ],
        rows,
    )


def _verdict(jobs: list[dict[str, Any]]) -> str:
    differences = [
        100 * (job["disturbed"]["accuracy"] - job["undisturbed"]["accuracy"]) for job in jobs
    ]
    mean, kills = statistics.mean(differences), sum(job["disturbed"]["kills"] for job in jobs)
    met = "reached" if mean >= -0.5 else "missed"
    return filled(
        f"**{kills} kills changed the final accuracy by {mean:+.2f} points, the mean of "
        f"{len(jobs)} seeds** (goal: a loss of at most 0.5 points, {met})."
    )
