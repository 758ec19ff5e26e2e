"""How large residuals become, beside what theory says of them: docs/residuals.md.

The runs are in `agenda`, what measures them in `watch`, the theory in `bounds`; `records` runs them
all, into docs/results/residuals.json, and `page` makes page and picture of that file alone.
"""

import study.workloads  # noqa: F401 - puts examples/ on the path
