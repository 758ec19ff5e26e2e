"""TopKEF with what real training adds to a loop, beside dense with the same: docs/practice.md.

What is trained is in `agenda`, how in `training`; `records` starts real ranks for all of it, into
docs/results/practice.jsonl, and `page` makes page and picture of that file alone.
"""

import study.frontier  # noqa: F401 - puts examples/ on the path
