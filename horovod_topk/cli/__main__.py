"""`python -m horovod_topk.cli`."""

import sys

from horovod_topk.cli import main

sys.exit(main())
