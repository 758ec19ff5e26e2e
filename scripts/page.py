"""Write pages of docs/ from docs/results, without running anything.

python scripts/page.py accuracy frontier wire
"""

from __future__ import annotations

import sys

from pages import DOCS, write


def main() -> None:
    """Write the named pages."""
    for name in sys.argv[1:]:
        print(f"written: {write(name).relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
