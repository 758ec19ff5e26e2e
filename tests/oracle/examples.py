"""How many examples a property test tries, in each tier of tests/conftest.py.

The same ones from run to run. The tiers of `make test` and `make test-tools` try a third of what
the full tier does.
"""

from __future__ import annotations

from hypothesis import settings

DEFAULT = 12  # examples of a test without `@examples`, in the full tier
# One in how many.
PART = {"fast": 3, "tools": 3, "usual": 3, "rest": 1, "all": 1, "integrations": 1}

for _tier, _part in PART.items():
    settings.register_profile(
        _tier, derandomize=True, deadline=None, max_examples=DEFAULT // _part, database=None
    )


def load(tier: str) -> None:
    """Try as many as in a tier; before any test module is imported."""
    settings.load_profile(tier)


def examples(count: int) -> settings:
    """A decorator of a property test that tries so many examples in the full tier."""
    return settings(max_examples=max(count * settings.default.max_examples // DEFAULT, 1))
