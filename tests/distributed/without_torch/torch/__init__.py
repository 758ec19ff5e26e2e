"""Stands before PyTorch on a launch's path, for commands that take TensorFlow where it is alone."""

raise ImportError("left out of launches of TensorFlow ranks")
