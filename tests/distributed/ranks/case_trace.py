"""A bucket takes a way as short as docs/architecture.md says, through the files it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horovod_topk.kernels import native
from trace_bucket import trace

LONGEST = 18  # functions each way
PAGE = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
OUT, BACK = range(1, 8), range(8, 10)  # steps of the page


def files_of(steps: range) -> set[str]:
    """Files that open these steps of the page."""
    found = set()
    for step in steps:
        line = re.search(rf"^{step}\. ((?:`[\w/.]+`,?\s+)*`[\w/.]+`):", PAGE, re.MULTILINE)
        assert line, f"step {step} of the page opens with no file"
        found |= set(re.findall(r"`([\w/.]+)`", line[1]))
    return found


@pytest.mark.skipif(native.find().library is None, reason="array operations take a longer way")
def test_a_bucket_takes_the_way_that_the_page_tells() -> None:
    found = trace()
    assert 10 <= len(found["out"]) <= LONGEST, found["out"]
    assert 10 <= len(found["back"]) <= LONGEST, found["back"]
    out, back = ({line.split()[0] for line in found[part]} for part in ("out", "back"))
    assert out == files_of(OUT)
    assert files_of(BACK) <= back <= files_of(OUT) | files_of(BACK)
