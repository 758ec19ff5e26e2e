"""`horovod-topk doctor`: prints what is installed, what is wrong, and the cure."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence

from horovod_topk import __version__
from horovod_topk.cli.doctor import exchange, kernels, software, system
from horovod_topk.cli.doctor.finding import Finding, is_installed
from horovod_topk.cli.options import FLAG, Options

DESCRIPTION = (
    "Print what is installed, what is wrong, and how to cure it. It looks at Horovod and the "
    "frameworks, the kernels for CPU and GPU, and the network; then two ranks of this machine "
    "exchange data. The exit status is 1 if that exchange fails, else 0."
)


OPTIONS: Options = {
    "--no-exchange": {**FLAG, "help": "do not start the two ranks (default: start them)"}
}


def main(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if the exchange between two ranks failed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors from TensorFlow
    own = Finding("horovod_topk", __version__)
    build = software.find_build()
    known = None if build is None else build.controllers
    listed = itertools.chain(software.findings(build), kernels.findings(), system.findings(known))
    found = [own]
    _print(own)
    for finding in listed:
        _print(finding)
        found.append(finding)
    if args.no_exchange:
        _print(in_short(found))
        return 0
    if known is not None:
        last = exchange.meet(known)
    elif is_installed("torch"):
        last = exchange.meet_without_horovod()
    else:
        last = Finding(exchange.NAME, "not tried, as there is neither Horovod nor PyTorch")
    _print(last)
    _print(in_short([*found, last]))
    return 1 if last.cure else 0


def in_short(found: Sequence[Finding]) -> Finding:
    """Report whether anything is wrong on this host. Cures "for several hosts" are not counted."""
    wrong = [each.name for each in found if each.cure and not each.cure.startswith("for ")]
    if wrong:
        return Finding("in short", f"look at the cures of: {', '.join(wrong)}")
    return Finding("in short", "all is well on this host")


def _print(finding: Finding) -> None:
    print("\n".join(finding.lines()), flush=True)
