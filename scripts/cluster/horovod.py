"""What `horovodrun` has to be told of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.host import INTERFACE


def complete(command: Sequence[str], hosts: Sequence[str], slots: int) -> list[str]:
    """`horovodrun ...` with the cluster's hosts, ranks and card, where it does not name its own.

    Its cache of what it found out about hosts is left out: theirs would outlive them. Any other
    command stays as it is.
    """
    program, *rest = command
    if Path(program).name != "horovodrun":
        return list(command)
    options = {
        ("-np", "--num-proc"): str(len(hosts) * slots),
        ("-H", "--hosts", "-hostfile", "--hostfile"): ",".join(f"{h}:{slots}" for h in hosts),
        ("--network-interfaces", "--network-interface"): INTERFACE,
    }
    added = ["--disable-cache"]
    for names, value in options.items():
        if not any(name in rest for name in names):
            added += [names[0], value]
    return [program, *added, *rest]
