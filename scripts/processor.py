"""What the benchmarks say of the machine they ran on."""

from horovod_topk.cli.bench.machine import cpu_model

__all__ = ["cpu_model"]
