"""What a host's network card has sent.

The kernel's packet scheduler counts what a cable would carry. The card's own counters are of
bundles of up to 64 KiB, whose packets they give one header in all.
"""

from __future__ import annotations

from horovod_topk.cli.bench.nic import HEADERS, Sent, scheduled

__all__ = ["HEADERS", "INTERFACE", "Sent", "sent"]

INTERFACE = "eth0"


def sent() -> Sent:
    """So far, by this host; its link has to be shaped, as an unshaped one has no scheduler."""
    found = scheduled(INTERFACE)
    assert found is not None
    return found
