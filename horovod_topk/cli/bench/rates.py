"""What a network card says of its link."""

from __future__ import annotations

from pathlib import Path


def rate_of_card(interface: str) -> int | None:
    """What a card says of its link; None where it says nothing, or is virtual and makes it up."""
    card = Path(f"/sys/class/net/{interface}")
    if not (card / "device").exists():
        return None
    try:
        megabits = int((card / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 10**6 if megabits > 0 else None
