"""Kill ranks of elastic jobs at random moments, and see what is lost: `scripts/crashes.py`."""

import sys

import launch

sys.path.append(str(launch.ROOT / "examples"))  # their model, data and schedule are used here
