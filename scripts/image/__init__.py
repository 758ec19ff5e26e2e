"""Builds docker/Dockerfile and tries what is in it: `scripts/check-image`.

The modules, from the whole to the parts:

    check.py     what the image has to do, and the figures of it
    buildah.py   buildah builds, and namespaces of `cluster` are the containers
    pip.py       this machine's pip settings, for the build alone
"""
