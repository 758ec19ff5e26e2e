"""`print(stats)` is a table of about ten lines that fit a terminal."""

from __future__ import annotations

import pytest

from horovod_topk.core.run.stats import Stats

WHOLE = {
    f"layers.{i}.bias": f"{i + 1} elements, fewer than min_numel=1024: sent dense"
    for i in range(50)
}
STATS = Stats(
    active=True,
    ranks=4,
    exchange="allgather",
    buckets=2,
    steps=100,
    rolled_back=3,
    elements=1_000_000,
    sent_bytes=10_000,
    dense_bytes=6_000_000,
    total_sent_bytes=1_500_000,
    total_dense_bytes=618_000_000,
    residual_norm=3.0,
    gradient_norm=1.5,
    residual_norm_ratio=1.9,
    compress_seconds=0.206,
    exchange_seconds=0.412,
    exposed_seconds=0.103,
    decompress_seconds=0.309,
    memory_bytes=8_000_000,
    element_bytes={"residuals": 2.03125, "arrivals": 8.0, "factors": 1e-5},
    level=0.02,
    ratios={"head.weight": 0.1},
    skipped=WHOLE,
    warnings=("a momentum is set twice " * 40,),
)


def rows(stats: Stats) -> dict[str, str]:
    """The table's lines by their first column; lines that go on are joined."""
    found, name = dict[str, str](), ""
    for line in str(stats).splitlines():
        assert len(line) <= 100
        name = line[:14].strip() or name
        found[name] = " ".join(filter(None, [found.get(name, ""), line[14:]]))
    return found


def test_a_table_of_what_is_sent_and_what_waits() -> None:
    found = rows(STATS)
    assert found["exchange"] == "allgather among 4 ranks, 1,000,000 elements in 2 buckets"
    times = "10,000 sent by this rank, 6,000,000 in a dense allreduce: 600.0 times fewer"
    assert found["bytes a step"] == times
    total = "1,500,000 sent by this rank, 618,000,000 in a dense allreduce: 412.0 times fewer"
    assert found["bytes so far"] == f"{total}; earlier steps sent more"
    whole = "50 tensors such as 'layers.0.bias': fewer than min_numel=1024"
    assert found["sent whole"] == whole
    assert found["residual"] == "2 times the gradient in the last step (norms 3 and 1.5)"
    took = "compress 2 ms, exchange 4 ms, of which 1 ms of waiting, decompress 3 ms (means)"
    assert found["time a step"] == took
    assert found["steps"] == "100 committed, 3 rolled back; now at ratio 0.02"
    memory = "8,000,000 bytes of residuals, method's state and payloads"
    assert found["memory"] == f"{memory} (residuals 2.03, arrivals 8 an element)"
    assert found["warnings"].startswith("a momentum is set twice")
    assert len(str(STATS).splitlines()) <= 14
    assert "skipped" not in str(STATS)


def test_what_horovod_exchanges_is_not_sent_whole() -> None:
    why = "sparse gradient: exchanged by Horovod's own allgather"
    sparse = {"embedding": why}
    found = rows(Stats(active=True, skipped=sparse, fallbacks={"trend": 1}, late={"a": 2}))
    assert found["sent whole"] == "no tensor"
    assert found["by Horovod"] == f"'embedding': {why}"
    assert found["residual"].startswith("no gradient yet")
    assert found["steps"].endswith("fell back (trend: 1)")
    assert found["late"] == "1 tensor delayed a bucket, 'a' in 2 steps"


@pytest.mark.parametrize("why", ["world size 1: there is nobody to exchange with", ""])
def test_without_compression_it_says_why(why: str) -> None:
    found = rows(Stats(skipped={"*": why} if why else {}))
    assert found["compression"] == f"off: {why or 'nothing is exchanged'}"
    assert found["warnings"] == "none"
