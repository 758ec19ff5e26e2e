"""The errors that this package raises: one base class, and one subclass for each cause.

A message names the tensor (if there is one), the value received, the limit, and the cure. An error
is raised before any residual has changed.
"""

from __future__ import annotations


class TopKError(Exception):
    """Base class of all errors of this package.

    Args:
        problem: what was received and what was expected, without a full stop.
        cure: what the user can do about it, without a full stop.
        tensor: name of the tensor; None: the error is not about one tensor.
    """

    ag_pass_through = True  # has TensorFlow's AutoGraph raise it unchanged

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
    """A setting is out of its range, or does not fit another setting or the optimizer.

    Cure: Change the setting as the message says.
    """


def check(is_valid: bool, setting: str, value: object, problem: str, cure: str) -> None:
    """Raise ConfigError about a setting unless its value is valid.

    Args:
        is_valid: whether it is.
        setting, value: name and value.
        problem: what follows them in the message.
        cure: as of `TopKError`.
    """
    if not is_valid:
        raise ConfigError(f"{setting}={value!r} {problem}", cure=cure)


class UnknownSettingError(TopKError, TypeError):
    """A keyword argument is not a setting.

    Cure: Take the name that the message suggests.
    """


class AdapterImportError(TopKError, ModuleNotFoundError):
    """What an adapter needs is not installed, or a name was imported from the wrong module.

    Cure: Install what the message names, or import from the module that it names.
    """


class DuplicateNameError(TopKError, ValueError):
    """Two tensors have the same name, so they would share a residual.

    Cure: Give each parameter a name of its own, as `model.named_parameters()` does.
    """


class UnsupportedDtypeError(TopKError, TypeError):
    """A gradient has a dtype that cannot be compressed with these settings.

    Cure: Keep parameters in float32, or leave out the setting that the message names.
    """


class TensorTooLargeError(TopKError, ValueError):
    """A tensor has more elements than an index can address.

    Cure: Split the parameter, or leave it out of the optimizer that is compressed.
    """


class UnsupportedOperationError(TopKError, ValueError):
    """A feature of Horovod or the optimizer does not work with compression (Adasum, join).

    Cure: Leave the feature out, or do what the message says instead.
    """


class ShapeChangedError(TopKError, ValueError):
    """A gradient's shape, dtype or device differs from those of its residual.

    Cure: Build the distributed optimizer, or wrap the model, after it has its final shapes, dtype
    and device.
    """


class OverlappingGradientError(TopKError, ValueError):
    """A gradient's elements share memory, as in an expanded tensor, and cannot be written to.

    Cure: Assign a gradient of its own memory: `p.grad = gradient.clone()`.
    """


class GradientChangedError(TopKError, RuntimeError):
    """A gradient was modified after backward() and before its exchange ended.

    Cure: Change gradients after their exchange: with Horovod after
    `optimizer.synchronize()`, with DistributedDataParallel after `backward()`.
    """


class RepeatedSynchronizeError(TopKError, RuntimeError):
    """A gradient that was already exchanged would be exchanged again.

    Cure: Call `zero_grad()` before the next `backward()`. For several backward passes in a step,
    pass Horovod `backward_passes_per_step`, and use `no_sync()` of DistributedDataParallel.
    """


class StepBeforeSynchronizeError(TopKError, RuntimeError):
    """The optimizer would apply gradients that have not been exchanged.

    Cure: Call `backward()` through the wrapped model before `step()`, outside of `no_sync()`.
    """


class NotLaunchedError(TopKError, RuntimeError):
    """A bucket was finished before it was sent.

    Cure: Report it: it is a fault of this package.
    """


class PlanMismatchError(TopKError, RuntimeError):
    """Ranks differ in their settings or in the tensors that they exchange.

    Cure: Give all ranks the same settings, model and order of parameters, and call `set_ratio`,
    `load_state_dict`, `reset` and `step` on every rank in the same order.
    """


class MissingRanksError(TopKError, RuntimeError):
    """Other ranks did not come to a meeting of all ranks within the time limit.

    Cure: Look into the logs of the ranks that it names: they have ended, or made no optimizer.
    """


class PayloadError(TopKError, RuntimeError):
    """Received bytes are not a payload of this bucket.

    Cure: Install the same version on all ranks. If they have it, look for a damaged network.
    """


class StateDictError(TopKError, ValueError):
    """A state dict does not fit the optimizer that it is loaded into.

    Cure: Load it into the optimizer, model and method that saved it.
    """


class NotAttachedError(TopKError, LookupError):
    """No optimizer uses this compressor, several do, or another optimizer makes the step.

    Cure: Pass the compressor to the optimizer that makes the steps, and keep that optimizer.
    """


class OutsideOptimizerError(TopKError, RuntimeError):
    """The compressor was used outside of a distributed optimizer or gradient tape.

    Cure: Pass it as `compression=` to a distributed optimizer or gradient tape.
    """


class CheckpointError(TopKError, ValueError):
    """A file of a checkpoint is missing, damaged, or belongs to another rank or step.

    Cure: Load an older checkpoint, or pass `strict=False` to start at zero where it does not fit.
    """
