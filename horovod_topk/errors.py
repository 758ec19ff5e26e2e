"""Every error this package raises: one base class, one subclass per cause.

Each message names the tensor (where there is one), the value met, the limit, and the cure.
An error is raised before any residual has changed.
"""

from __future__ import annotations


class TopKError(Exception):
    """Base of all errors of this package.

    Args:
        problem: what was met and what was expected, without a full stop.
        cure: what the user can do about it, without a full stop.
        tensor: name of the tensor concerned, if one is.
    """

    ag_pass_through = True  # asks TensorFlow's AutoGraph to raise it as it is, not as its own

    def __init__(self, problem: str, *, cure: str, tensor: str | None = None) -> None:
        self.problem = problem
        self.cure = cure
        self.tensor = tensor
        where = f"tensor {tensor!r}: " if tensor is not None else ""
        super().__init__(f"{where}{problem}. {cure}.")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self.cure, self.tensor)


def _rebuild(kind: type[TopKError], problem: str, cure: str, tensor: str | None) -> TopKError:
    """Unpickle an error: launchers send exceptions between processes."""
    return kind(problem, cure=cure, tensor=tensor)


class ConfigError(TopKError, ValueError):
    """A setting lies outside its range."""


class UnknownSettingError(TopKError, TypeError):
    """A keyword argument that no setting has."""


class DuplicateNameError(TopKError, ValueError):
    """Two tensors share a name, so they would share a residual."""


class UnsupportedDtypeError(TopKError, TypeError):
    """A gradient whose dtype cannot be compressed."""


class TensorTooLargeError(TopKError, ValueError):
    """A tensor with more elements than an index can address."""


class UnsupportedOperationError(TopKError, ValueError):
    """A Horovod feature that has no meaning for sparse payloads (Adasum, join)."""


class ShapeChangedError(TopKError, ValueError):
    """A gradient's shape, dtype or device differs from its residual's."""


class OverlappingGradientError(TopKError, ValueError):
    """A gradient whose elements share memory, as an expanded tensor's do."""


class GradientChangedError(TopKError, RuntimeError):
    """A gradient was modified after it was sent and before it was replaced."""


class RepeatedSynchronizeError(TopKError, RuntimeError):
    """An exchanged gradient was about to be exchanged again."""


class StepBeforeSynchronizeError(TopKError, RuntimeError):
    """The optimizer would step on gradients that have not been exchanged."""


class NotLaunchedError(TopKError, RuntimeError):
    """A bucket was finished that was not launched."""


class PlanMismatchError(TopKError, RuntimeError):
    """Ranks disagree on what they exchange."""


class PayloadError(TopKError, RuntimeError):
    """Bytes received are not a payload of this bucket."""


class StateDictError(TopKError, ValueError):
    """A state dict does not fit the optimizer it is loaded into."""


class NotAttachedError(TopKError, LookupError):
    """No distributed optimizer, or more than one, stands behind a compressor."""


class OutsideOptimizerError(TopKError, RuntimeError):
    """The compressor was given to something other than a distributed optimizer."""


class CheckpointError(TopKError, ValueError):
    """A shard of a checkpoint is missing, damaged, or another one."""
