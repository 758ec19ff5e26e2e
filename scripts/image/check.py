"""What the image has to do."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from image.buildah import Buildah, HostContainers, ImageError
from image.pip import PipSettings
from setup.run import Console

STEPS = 20
DIGITS = ("python", "examples/pytorch_digits.py", "--compression", "topk", "--steps", str(STEPS))
# As docker/mpijob.yaml has it: a launcher without a rank, and workers.
MPI_FLAGS = (
    *("--bind-to", "none", "--map-by", "slot"),
    *("--mca", "pml", "ob1", "--mca", "btl", "^openib", "--mca", "btl_tcp_if_include", "eth0"),
    *("-x", "OMP_NUM_THREADS=1"),
)
# All containers share this machine's cores; horovodrun hands it on.
HOROVODRUN = ("env", "OMP_NUM_THREADS=1", "horovodrun")
LIMIT_SECONDS = 180.0
SSHD_SECONDS = 30.0  # until all of them have to answer


def check(
    engine: Buildah,
    console: Console,
    frameworks: Sequence[str],
    hosts: int,
    settings: PipSettings,
) -> str:
    """Build the image and try it; return the time and the size in words."""
    began = time.monotonic()
    engine.build(frameworks, settings)
    seconds = time.monotonic() - began
    figures = f"built in {seconds:.0f} s, {engine.size() / 1e6:.0f} MB"
    console.note(figures)
    with engine.containers(1) as alone:
        try_alone(alone, console, gpu="--cuda" in frameworks)
    with engine.containers(hosts) as cluster:
        try_across(cluster, console)
    return figures


def try_alone(containers: HostContainers, console: Console, *, gpu: bool) -> None:
    """One container: who runs it, what compresses, and two ranks in it.

    gpu: Horovod has to have NCCL's operations. Ranks train on processors all the same.
    """
    console.step("One container")
    user = containers.run(["id"], limit_seconds=LIMIT_SECONDS).strip()
    if "uid=0" in user:
        raise ImageError(f"the image runs as root: {user}")
    console.note(user)
    doctor = containers.run(["horovod-topk", "doctor"], limit_seconds=LIMIT_SECONDS)
    if not re.search(r"kernels for the CPU +(avx512|avx2|portable|neon)", doctor):
        raise ImageError(f"the image has no CPU kernels:\n{doctor}")
    for line in doctor.strip().splitlines():
        console.note(line)
    built = containers.run(["horovodrun", "--check-build"], limit_seconds=LIMIT_SECONDS)
    if ("[X] NCCL" in built) != gpu:
        raise ImageError(f"Horovod has {'no ' if gpu else ''}operations by NCCL:\n{built}")
    two = [*HOROVODRUN, "-np", "2", "--gloo", *DIGITS]
    console.note(summary(containers.run(two, limit_seconds=LIMIT_SECONDS), ranks=2))


def try_across(containers: HostContainers, console: Console) -> None:
    """Several containers, as docker/compose.yaml has them: a rank in each, over ssh."""
    names = containers.names
    console.step(f"{len(names)} containers, a rank in each")
    await_sshd(containers, names[1:])
    hosts = ",".join(f"{name}:1" for name in names)
    cluster = ["-np", str(len(names)), "-H", hosts, "--network-interfaces", "eth0"]
    for controller in ("--gloo", "--mpi"):
        command = [*HOROVODRUN, *cluster, controller, *DIGITS]
        console.note(f"horovodrun {controller} ...")
        printed = containers.run(command, limit_seconds=LIMIT_SECONDS)
        console.note(summary(printed, ranks=len(names)))
    if workers := names[1:]:
        console.note("mpirun, with no rank on the first ...")
        hosts = ",".join(f"{name}:1" for name in workers)
        command = ["mpirun", "-np", str(len(workers)), "-H", hosts, *MPI_FLAGS, *DIGITS]
        printed = containers.run(command, limit_seconds=LIMIT_SECONDS)
        console.note(summary(printed, ranks=len(workers)))


def await_sshd(containers: HostContainers, names: Sequence[str]) -> None:
    """Until every host lets the user in."""
    deadline = time.monotonic() + SSHD_SECONDS
    tried = "; ".join(f"ssh {name} hostname" for name in names)
    while True:
        try:
            printed = containers.run(["sh", "-ec", tried], limit_seconds=LIMIT_SECONDS)
        except ImageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
            continue
        if printed.split() != list(names):
            raise ImageError(f"ssh to {', '.join(names)} printed {printed!r}")
        return


def summary(printed: str, *, ranks: int) -> str:
    """The line with which the example ends."""
    found = re.search(rf"topk at .*?ranks: {ranks}, steps: {STEPS};[^\n\[]*", printed)
    if not found:
        raise ImageError(f"the example did not say that it ran:\n{printed[-4000:]}")
    return found[0].strip()
