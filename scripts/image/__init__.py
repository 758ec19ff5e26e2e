"""Builds docker/Dockerfile.cpu and tries what is in it: `scripts/check-image`.

The modules, from the whole to the parts:

    check.py     what the image has to do, and the figures of it
    engine.py    what an engine is, and which of the two is taken
    docker.py    the one where Docker runs
    buildah.py   the other: buildah builds, and namespaces of `cluster` are the containers
    base.py      the base image where no registry answers: debootstrap's
    pip.py       this machine's pip settings, for the build alone
"""
