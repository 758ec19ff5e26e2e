"""What `scripts/netlab` can tell before it makes a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import ClusterError, Link, missing, needs
from cluster.lab import complete
from cluster.link import bits_per_second

pytestmark = pytest.mark.tools

HOSTS = ["host1", "host2"]


def test_without_root_the_cure_is_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "sudo" in (missing() or "")


def test_without_its_programs_the_cure_is_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(needs, "SBIN", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in needs.PROGRAMS:
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "tc").unlink()
    assert "not installed: tc. On Debian and Ubuntu: apt-get install iproute2" in (missing() or "")
    assert "tc, iptables. " in (missing(lossy=True) or "")


@pytest.mark.parametrize(
    ("rate", "bits"), [("100mbit", 10**8), ("1Gbit", 10**9), ("2.5gbit", 2_500_000_000)]
)
def test_rates_are_bits_a_second(rate: str, bits: int) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize(("delay", "seconds"), [("50ms", 0.05), ("0.5S", 0.5), ("2.5ms", 0.0025)])
def test_delays_are_seconds_one_way(delay: str, seconds: float) -> None:
    assert Link.of(None, delay=delay).delay == pytest.approx(seconds)


def test_what_is_no_rate_and_no_delay_is_refused() -> None:
    for rate in ("fast", "100", "1gb", "1gbits", "-1gbit", ""):
        with pytest.raises(ClusterError, match="write 100mbit"):
            Link.of(rate)
    for delay in ("slow", "50", "5min", "-5ms", ""):
        with pytest.raises(ClusterError, match="write 50ms"):
            Link.of(None, delay=delay)
    with pytest.raises(ClusterError, match="give 0 to 10 s"):
        Link(delay=60.0)


def test_only_a_link_with_a_delay_needs_a_program_for_it() -> None:
    assert Link.of("100mbit").delaying() == []
    arguments = Link.of("100mbit", delay="50ms").delaying()
    assert arguments == ["--delay", "0.05", "--rate", "100000000", "--queue", "0.05"]


@pytest.mark.parametrize("rate", ["1mbit", "100mbit", "300mbit", "500mbit"])
def test_a_bundle_with_its_headers_leaves_in_one_burst(rate: str) -> None:
    link = Link.of(rate)
    name, size = link.bundles()
    assert name == "gso_max_size"
    assert link.burst / 2 < int(size) * 1514 / 1448 < link.burst


def test_a_fast_link_takes_any_bundle_and_a_lossy_one_none() -> None:
    assert Link.of("1gbit").bundles() == Link().bundles() == []
    assert Link.of("100mbit", loss=0.1).bundles() == ["gso_max_segs", "1"]


def test_horovodrun_is_told_of_the_hosts() -> None:
    assert complete(["/bin/horovodrun", "--gloo", "python", "train.py"], HOSTS, 2) == [
        "/bin/horovodrun",
        *("--disable-cache", "-np", "4", "-H", "host1:2,host2:2", "--network-interfaces", "eth0"),
        *("--gloo", "python", "train.py"),
    ]


def test_what_the_command_names_itself_stays() -> None:
    added = complete(["horovodrun", "-np", "1", "-H", "host2:1", "true"], HOSTS, 2)
    assert added.count("-np") == added.count("-H") == 1
    assert "host1:2,host2:2" not in added


def test_other_commands_stay_as_they_are() -> None:
    assert complete(["ssh", "host2", "hostname"], HOSTS, 1) == ["ssh", "host2", "hostname"]


def test_what_the_kernel_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = needs._refused("echo no such link >&2; exit 1")
    assert refused is not None
    assert "a container needs --privileged" in refused
