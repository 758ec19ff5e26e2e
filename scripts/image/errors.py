"""The one error."""


class ImageError(Exception):
    """The image cannot be built or does not work; the message says what failed, and the cure."""
