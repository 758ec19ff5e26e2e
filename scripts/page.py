"""Write the pages of docs/ that show results, without running anything.

python scripts/page.py accuracy frontier wire
"""

from __future__ import annotations

import sys

from pages import write


def main() -> None:
    """Write the pages that show the named results."""
    for name in sys.argv[1:]:
        write(name)


if __name__ == "__main__":
    main()
