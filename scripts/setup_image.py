"""Fill a container image's virtual environment. Run by docker/Dockerfile, in two layers.

    python3.11 scripts/setup_image.py horovod /opt/horovod     # frameworks and Horovod; minutes
    python3.11 scripts/setup_image.py package /opt/horovod     # this package; seconds

The first needs scripts/ alone, so that an edit of the package leaves its layer as it is. The
versions are those of `make setup`. The work itself is in `setup/image.py`.
"""

import sys

from setup_env import python_problem

if __name__ == "__main__":
    problem = python_problem(sys.version_info[:2], sys.platform)
    if problem:
        sys.exit("setup: " + problem)
    from setup.image import main

    sys.exit(main())
