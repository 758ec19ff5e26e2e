"""Stands before TensorFlow on a launch's path: `horovodrun` would import it to ask what is built.

It asks PyTorch next, and starts three seconds sooner. No rank here needs TensorFlow.
"""

raise ImportError("left out of launches of PyTorch ranks")
