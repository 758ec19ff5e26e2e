"""Writes the pages of studies from docs/results, without running anything.

python scripts/study_page.py accuracy frontier practice
"""

from __future__ import annotations

import sys

import launch
from study.page import write


def main() -> None:
    """Write the named pages."""
    for name in sys.argv[1:]:
        print(f"written: {write(name).relative_to(launch.ROOT)}")


if __name__ == "__main__":
    main()
