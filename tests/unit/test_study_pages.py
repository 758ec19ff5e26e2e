"""How the pages of the studies write what several seeds came to."""

from __future__ import annotations

import pytest

from study.markdown import spread


def test_one_or_two_seeds_are_written_as_they_are() -> None:
    assert spread([5.731], "+", "%") == "+5.73%"
    assert spread([0.88, -0.69], "+", "%") == "+0.88%, -0.69%"
    assert spread([-0.001, 0.5], "+") == "+0.00, +0.50"


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
def test_three_seeds_are_a_mean_with_its_standard_error(values: list[float]) -> None:
    assert spread(values, unit="%") == "2.00 ± 0.58%"
