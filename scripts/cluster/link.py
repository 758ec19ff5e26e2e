"""A host's link to the others: its bits a second each way, its loss and its delay."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.needs import ClusterError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MOST_DELAY = 10.0  # seconds
QUEUE_SECONDS = 0.05  # of traffic that waits for the link, before packets are dropped
BURST_SECONDS = 0.001  # of traffic that may leave at once: the kernel's clock ticks no finer
LEAST_BURST = 16 << 10  # bytes
MOST_BUNDLE = 64 << 10  # bytes that the kernel hands to a card as one, of its own accord
BUNDLE = 0.9  # of a burst: tbf counts a header of 66 bytes for each packet of a bundle


@dataclass(frozen=True)
class Link:
    """A full-duplex link."""

    rate: int | None = None  # bits a second, each way; None: whatever the processor can carry
    loss: float = 0.0  # share of the packets that arrive at a host and are dropped
    delay: float = 0.0  # seconds from one host to another; there and back is twice as long

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise ClusterError(f"a loss of {self.loss:g} is no share: give 0 or more, and below 1")
        if self.rate is not None and self.rate < 1000:
            raise ClusterError(f"a rate of {self.rate} bit/s is no link: give 1kbit or more")
        if not 0 <= self.delay <= MOST_DELAY:
            raise ClusterError(f"a delay of {self.delay:g} s: give 0 to {MOST_DELAY:g} s")

    @classmethod
    def of(cls, rate: str | None, loss: float = 0.0, delay: str | None = None) -> Link:
        """A link of a rate such as "100mbit" or "2.5gbit", and of a delay such as "50ms"."""
        bits = None if rate is None else bits_per_second(rate)
        return cls(bits, loss, 0.0 if delay is None else seconds(delay))

    def bundles(self) -> list[str]:
        """What `ip link set` takes for packets to come in bundles that the link can handle.

        The kernel sends bundles of up to 64 KiB. A lossy link would lose forty packets at once: it
        gets them one by one. A shaped one takes apart what is larger than its burst, packet by
        packet, and what many hosts send at 300 Mbit/s then keeps this machine's cores so busy
        that half of it arrives.
        """
        if self.loss:
            return ["gso_max_segs", "1"]
        if self.rate is None or BUNDLE * self.burst > MOST_BUNDLE:
            return []
        return ["gso_max_size", f"{round(BUNDLE * self.burst)}"]

    @property
    def burst(self) -> int:
        """Bytes that may leave at once."""
        assert self.rate is not None
        return max(LEAST_BURST, round(self.rate / 8 * BURST_SECONDS))

    def shaping(self) -> list[str]:
        """The discipline that `tc qdisc add dev ... root` takes; empty for an unshaped link."""
        if self.rate is None:
            return []
        queue = self.burst + round(self.rate / 8 * QUEUE_SECONDS)
        return ["tbf", "rate", f"{self.rate}bit", "burst", f"{self.burst}b", "limit", f"{queue}b"]

    def delaying(self) -> list[str]:
        """Arguments of `cluster.delay`, which passes frames on; empty for a link without delay."""
        if not self.delay:
            return []
        rate = ["--rate", f"{self.rate or 0}"]
        return ["--delay", f"{self.delay:g}", *rate, "--queue", f"{QUEUE_SECONDS:g}"]

    def dropping(self) -> list[str]:
        """The rule that iptables takes; empty for a link without loss.

        The kernel's netem could do it too, but many kernels are built without it.
        """
        if not self.loss:
            return []
        match = ["--match", "statistic", "--mode", "random", "--probability", f"{self.loss:.9f}"]
        return ["--append", "INPUT", "--in-interface", "eth0", *match, "--jump", "DROP"]


def bits_per_second(rate: str) -> int:
    """Of "100mbit" and the like."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if found is None:
        raise ClusterError(f"{rate!r} is no rate: write 100mbit, 1gbit or 2.5gbit")
    return round(float(found[1]) * UNITS[found[2]])


def seconds(duration: str) -> float:
    """Parse a duration such as "50ms" or "0.1s", to seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)s", duration.lower())
    if found is None:
        raise ClusterError(f"{duration!r} is no delay: write 50ms or 0.05s")
    return float(found[1]) / (1000 if found[2] else 1)
