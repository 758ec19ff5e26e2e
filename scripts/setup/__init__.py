"""The steps behind `make setup`, each module one concern. Standard library only.

The modules, from the whole to the parts:

    provision.py   the order of the steps, and what the user sees of a failure
    machine.py     what has to be there beforehand: compiler, make, headers, disk; how many jobs
    image.py       the same steps for a container image: docker/ calls it through setup_image.py
    horovod.py     the Horovod build: sources, flags, and the cache of its wheel
    *.patch        what is changed in Horovod's sources, and why
    cuda.py        what GPU operations are built with: a CUDA toolkit and NCCL
    run.py         commands, their log, progress on the terminal, and a failure put in one line
    state.py       what the last run left in `.venv`, and locks against a second run
"""
