"""Bytes at the network card: `scripts/bench_wire.py` makes the hosts, `wire.rank` runs on each."""
