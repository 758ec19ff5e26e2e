"""Table of each method's time, as `benchmarks.methods` and `network` have measured it."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.network import QUANTISED, SPARSE
from horovod_topk.cli.bench.figures import figures
from horovod_topk.core.run.substitute import Substitute, parse
from horovod_topk.errors import TopKError
from pages import RESULTS
from pages.markdown import table
from study.results import Study

ENCODE, NETWORK = RESULTS / "encode.json", RESULTS / "network.json"
RUNS = {"sparse": SPARSE, "quantised": QUANTISED}  # runs of `benchmarks.network`, at each rate
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def expenses(study: Study) -> str:
    """A row for each method: encoding time, and exchange time of a ResNet-50's gradients."""
    encode: dict[str, Any] = json.loads(ENCODE.read_text())["encode"]
    multiples = {_key(call): multiple for call, (_, multiple) in encode.items() if "(" in call}
    stored = json.loads(NETWORK.read_text())
    rows = []
    for kind, names in RUNS.items():
        links = [figures(stored[f"{kind}-{rate}"]) for rate in LINKS]
        for name in names:
            found, multiple = [link[name] for link in links], multiples.get(_key(name))
            encode_cost = "" if multiple is None else f"{multiple:.1f}"
            seconds = (f"{each.exchange:.2f}" for each in found)
            rows.append([f"`{name}`", encode_cost, *seconds, f"{(found[-1].bytes or 0) / 1e6:.1f}"])
    head = ["", "encode, of `r += g`", *(f"exchange, {words}, s" for words in LINKS.values())]
    return table([*head, "MB a step"], rows)


def _key(call: str) -> str:
    """A call without its exchange, on which encoding does not depend."""
    try:
        asked = parse(call)
    except TopKError:
        return call
    kept = {key: value for key, value in asked.settings.items() if key != "exchange"}
    return str(Substitute(asked.name, kept))
