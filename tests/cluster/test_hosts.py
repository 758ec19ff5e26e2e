"""The cluster itself: links that shape and lose, hosts that die."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster import Cluster, ClusterError, Host, Link
from skipping import skip_without

pytestmark = [pytest.mark.cluster, pytest.mark.tools, pytest.mark.slow, pytest.mark.timeout(120)]

PEERS = Path(__file__).with_name("peers.py")
CONNECT = """
import socket, sys, time
began = time.perf_counter()
socket.create_connection((sys.argv[1], 22), timeout=3.0).close()
print(time.perf_counter() - began)
"""
FLOOD = """
import socket, sys
sender = socket.socket(type=socket.SOCK_DGRAM)
while True:
    sender.sendto(bytes(1400), (sys.argv[1], 9))
"""
FOREVER = """
import horovod.torch as hvd, torch
hvd.init()
while True:
    hvd.allreduce(torch.zeros(1), name="forever")
    print("up", flush=True)
"""


def listen(host: Host, way: str) -> subprocess.Popen[bytes]:
    process = host.start([sys.executable, str(PEERS), way], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"listening\n"
    return process


def send(host: Host, to: Host, way: str, amount: int) -> bytes:
    """What the listener says of what it received, from `host`."""
    listener = listen(to, way)
    host.check([sys.executable, str(PEERS), way, to.address, str(amount)])
    return listener.communicate(timeout=60)[0]


def test_a_link_carries_its_rate_each_way() -> None:
    rate, amount = 80_000_000, 10_000_000
    with Cluster(2, Link(rate)) as cluster:
        one, two = cluster.hosts
        for source, target in ((one, two), (two, one)):
            seconds = float(send(source, target, "stream", amount))
            # 66 of 1,514 bytes are headers, and the first burst leaves at once.
            assert 0.8 * rate < 8 * amount / seconds < 1.02 * rate


def test_an_unshaped_link_is_faster() -> None:
    with Cluster(2) as cluster:
        one, two = cluster.hosts
        assert 8 * 10_000_000 / float(send(one, two, "stream", 10_000_000)) > 200_000_000


def test_a_lossy_link_loses_its_share_of_packets() -> None:
    skip_without("lossy")
    with Cluster(2, Link(loss=0.25)) as cluster:
        one, two = cluster.hosts
        assert 1400 < int(send(one, two, "datagrams", 2000)) < 1600


def test_what_a_lossy_link_loses_are_single_packets() -> None:
    skip_without("lossy")
    with Cluster(2, Link(loss=1e-6)) as cluster:
        one, two = cluster.hosts
        before = card(two)
        send(one, two, "stream", 3_000_000)
        received, packets = (after - was for after, was in zip(card(two), before, strict=True))
        assert 3_000_000 < received < 3_300_000
        assert packets > 3_000_000 / 1460


def test_a_shaped_link_takes_no_bundles_apart() -> None:
    with Cluster(2, Link.of("300mbit")) as cluster:
        one, two = cluster.hosts
        before = card(two)
        send(one, two, "stream", 3_000_000)
        received, packets = (after - was for after, was in zip(card(two), before, strict=True))
        assert received > 3_000_000
        assert packets < 3_000_000 / 1460 / 4


def test_a_delayed_link_carries_its_rate_that_much_later() -> None:
    skip_without("delayed")
    rate, delay, amount = 40_000_000, 0.02, 8_000_000
    with Cluster(2, Link(rate, delay=delay)) as cluster:
        one, two = cluster.hosts
        assert 2 * delay < min(connecting(one, two) for _ in range(4)) < 2 * delay + 0.05
        seconds = float(send(one, two, "stream", amount))
        assert 0.7 * rate < 8 * amount / seconds < 1.02 * rate


def test_hosts_that_send_to_the_same_one_share_its_delayed_link() -> None:
    skip_without("delayed")
    rate, seconds = 20_000_000, 1.0
    with Cluster(3, Link(rate, delay=0.002)) as cluster:
        target, *sources = cluster.hosts
        for each in sources:
            each.start([sys.executable, "-c", FLOOD, target.address])
        while card(target)[0] < rate / 8 * 0.2:
            time.sleep(0.01)
        before, began = card(target)[0], time.perf_counter()
        time.sleep(seconds)
        received = 8 * (card(target)[0] - before) / (time.perf_counter() - began)
        assert 0.8 * rate < received < 1.1 * rate


def test_a_delayed_host_without_power_says_nothing() -> None:
    skip_without("delayed")
    with Cluster(3, Link(delay=0.002)) as cluster:
        one, two, three = cluster.hosts
        connecting(one, two)
        two.lose_power()
        two.lose_power()
        with pytest.raises(ClusterError, match=r"No route to host|timed out"):
            connecting(one, two)
        assert connecting(one, three) < 1.0


def connecting(host: Host, to: Host) -> float:
    """Seconds that it takes to connect, which is there and back."""
    return float(host.run([sys.executable, "-c", CONNECT, to.address], limit_seconds=60))


def card(host: Host) -> tuple[int, int]:
    """Bytes and packets that its card has received."""
    folder = Path(f"/proc/{host.pid}/root/sys/class/net/eth0/statistics")
    return int((folder / "rx_bytes").read_text()), int((folder / "rx_packets").read_text())


@pytest.mark.parametrize(
    ("controller", "death"), [("gloo", Host.lose_power), ("mpi", Host.crash)], ids=["gloo", "mpi"]
)
def test_a_dying_host_ends_the_job_with_a_message(controller: str, death: object) -> None:
    with Cluster(2, Link.of("1gbit")) as cluster:
        job = cluster.start(
            ["horovodrun", f"--{controller}", sys.executable, "-c", FOREVER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert job.stdout is not None
        while b"up" not in (line := job.stdout.readline()):
            assert line, "the job ended before it began"
        survivor, victim = cluster.hosts
        assert callable(death)
        death(victim)
        printed = job.communicate(timeout=90)[0].decode(errors="replace")
        assert job.returncode not in (0, None)
        assert "terminat" in printed or "daemon" in printed, printed[-2000:]
        assert ranks(survivor) == []
        assert not Path(f"/proc/{victim.pid}").exists()


def ranks(host: Host) -> list[str]:
    """What runs there beside sshd, once it had the time to end."""
    deadline = time.monotonic() + 30
    while True:
        below = psutil.Process(host.pid).children(recursive=True)
        found = [each.name() for each in below if each.name() != "sshd"]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
