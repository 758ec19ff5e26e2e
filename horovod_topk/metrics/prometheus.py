"""Metrics for Prometheus, one endpoint a rank. `pip install horovod_topk[prometheus]`."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from horovod_topk import __version__
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.guard import REASONS

SECONDS = tuple(2.0**power for power in range(-12, 6))  # bounds of histograms: 0.24 ms to 32 s


class Prometheus:
    """Counts steps in a registry of its own, and serves its metrics over HTTP.

    Counters are totals; queries compute rates and quotients. docs/monitoring.md has a query
    and alerts.

    Args:
        rank: this rank, the label of all metrics.
        port: port of the endpoint, one for each rank of a host, such as 9400 + hvd.local_rank().
            None: no endpoint; `registry` may be served by other means.
        address: address on which the endpoint listens.
    """

    def __init__(self, rank: int, port: int | None = None, address: str = "0.0.0.0") -> None:
        self.registry, self._rank = CollectorRegistry(), str(rank)
        self._sent = self._metric(Counter, "sent_bytes", "Bytes that this rank sent")
        self._dense = self._metric(
            Counter, "dense_bytes", "Bytes of a dense ring allreduce in their place"
        )
        self._seconds = {
            part: self._metric(Histogram, part, text, buckets=SECONDS)
            for part, text in {
                "compress_seconds": "Seconds of encoding, a step",
                "exchange_seconds": "Seconds from the first to the last collective of a step",
                "exposed_seconds": "Seconds of waiting in collectives, a step",
                "decompress_seconds": "Seconds of decoding, a step",
            }.items()
        }
        self._gauges = {
            name: self._metric(Gauge, name, text)
            for name, text in {
                "residual_norm_ratio": "Norm of the residual over that of the gradient",
                "sent_share": "Share of the squares of gradient plus residual that was sent",
                "probe_cosine": "Cosine of the applied gradient and the dense one, of a bucket",
                "probe_error": "Relative error of the applied gradient, of a bucket",
                "level": "Ratio of the last step",
                "memory_bytes": "Bytes held for compression",
            }.items()
        }
        self._steps = self._metric(Counter, "steps", "Steps by outcome", ["outcome"])
        self._fallbacks = self._metric(Counter, "fallback", "Fall-backs to dense", ["reason"])
        for reason in REASONS:  # start at 0, or Prometheus would miss the first increase
            self._fallbacks.labels(self._rank, reason)
        self._metric(Info, "build", "Version of horovod_topk").info({"version": __version__})
        self.port: int | None = None  # port of the endpoint
        if port is not None:
            self._server, self._thread = start_http_server(port, address, self.registry)
            self.port = self._server.server_port

    def __call__(self, counters: StepCounters) -> None:
        """Count one step."""
        self._sent.inc(counters.sent_bytes)
        self._dense.inc(counters.dense_bytes)
        for part, histogram in self._seconds.items():
            histogram.observe(getattr(counters, part))
        for name, gauge in self._gauges.items():
            if (number := getattr(counters, name)) is not None:
                gauge.set(number)
        outcome = "committed" if counters.committed else "rolled back"
        self._steps.labels(self._rank, outcome).inc()
        if counters.fell_back:
            self._fallbacks.labels(self._rank, counters.fell_back).inc()

    def close(self) -> None:
        """Stop the endpoint; `registry` still counts steps."""
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self.port = None

    def _metric(self, kind: Any, name: str, text: str, labels: Any = (), **more: Any) -> Any:
        """Create a metric with this rank as a label, and further labels to be set at each use."""
        names = ["rank", *labels]
        made = kind(f"hvdtopk_{name}", text, names, registry=self.registry, **more)
        return made if labels else made.labels(self._rank)
