"""docs/crashes.md, from docs/results/crashes.json."""

from __future__ import annotations

import statistics
from typing import Any

from study.markdown import table

PAGE = """\
# Killed ranks

<!-- Written by `make crashes` from docs/results/crashes.json. Change scripts/crash instead. -->

The digits (`examples/pytorch_digits.py`'s network, SGD with momentum, learning rate 0.1), ratio
0.01, in an elastic job: `horovod_topk.torch.elastic.TorchState` and
`TopKEF(commit_dir=...)`, a commit every {every} steps. Up to {hosts} ranks train, each on a host of
its own by name. One of them at a time is killed with SIGKILL, at a random moment of a step or a
commit, {least:g} seconds or more after the one before, once all ranks train together; Horovod
starts another. A step's examples are the same for any number of ranks. (Horovod 0.28 does not
survive the loss of a rank while ranks are about to meet, whatever they exchange: those that wait
for it abort.)

{machine}. Command: `make crashes`.

{jobs}

Steps redone are those between the last commit and the failure. Of {returns} returns to a commit the
one that cost most took {worst} steps again, {median:g} in the median; {every} steps lie between two
commits. {same} of them went on with the weights of the commit, to the bit. In {whole} of them what
all ranks owed together was what it had been, but for {apart:.1g} of its largest element at most; in
{partly} the file of a killed rank could not be had, which died between the others' commit and its
own: "residuals lost".

{verdict}
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
        apart=max((each["owed_apart"] or 0.0 for each in whole), default=0.0),
        verdict=_verdict(jobs),
    )


def _table(jobs: list[dict[str, Any]]) -> str:
    rows = []
    for job in jobs:
        calm, wild = job["undisturbed"], job["disturbed"]
        rows.append(
            [
                str(calm["seed"]),
                str(calm["steps"]),
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
            "undisturbed",
            "kills",
            "disturbed",
            "points",
            "residuals lost",
            "ranks end equal",
        ],
        rows,
    )


def _verdict(jobs: list[dict[str, Any]]) -> str:
    differences = [
        100 * (job["disturbed"]["accuracy"] - job["undisturbed"]["accuracy"]) for job in jobs
    ]
    mean = statistics.mean(differences)
    met = "reached" if mean >= -0.5 else "**missed**"
    return (
        f"In the mean of {len(jobs)} seeds the disturbed runs end {mean:+.2f} points from the "
        f"undisturbed ones (goal: within 0.5 points, {met})."
    )
