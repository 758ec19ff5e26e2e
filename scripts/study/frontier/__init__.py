"""The study behind docs/frontier.md: quality against bytes, with all ranks in one process.

Ranks hold the same weights, bit for bit, so one model stands for all of them: what each rank has of
its own is its batch, its gradients, its compressor and its residuals.
"""

import sys

import launch

sys.path.append(str(launch.ROOT / "examples"))  # their models, data and schedules are used here
