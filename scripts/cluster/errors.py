"""The one error."""


class ClusterError(Exception):
    """The cluster cannot be had; the message says what failed, and the cure where one is known."""
