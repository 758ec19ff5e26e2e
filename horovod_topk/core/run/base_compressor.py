"""Base class of the compressors of every framework, such as `TopKEF`.

It holds the settings and forwards calls such as `stats()` to the state of the optimizer that uses
it. Functions of this file say when nothing is compressed.
"""

from __future__ import annotations

import abc
import copy
import difflib
import gc
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

from horovod_topk.config import (
    FOLDED,
    Settings,
    fields_of,
    written,
)
from horovod_topk.core.run.attached import Attached, ByHorovod, Forwarded
from horovod_topk.core.run.substitute import (
    announce,
    check_replaceable,
    horovods,
    substitute,
)
from horovod_topk.errors import (
    AdapterImportError,
    ConfigError,
    NotAttachedError,
    OutsideOptimizerError,
)
from horovod_topk.methods import METHODS, Method
from horovod_topk.ratios import Predicate

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_SETTINGS = ("config", "deferred", "grad_scaler")


class on_class_too(Generic[Parameters, Result]):  # noqa: N801  # it is used as a decorator
    """A method that may be called on the class, for a compressor with default settings."""

    def __init__(self, method: Callable[Concatenate[Any, Parameters], Result]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: Any, owner: Any) -> Callable[Parameters, Result]:
        return types.MethodType(self._method, owner() if instance is None else instance)


class BaseCompressor(abc.ABC):
    """Base class of the objects that users pass as `compression=`, in every framework.

    A subclass names its method: `class TopKEF(Compressor, method=TopK)`. Its keyword arguments are
    the method's settings and `grad_scaler`; its docstring is built from the docstrings of the
    method, of `Settings` and of the framework's base class.
    """

    framework: ClassVar[str]  # "torch" or "tensorflow"
    adapter: ClassVar[str]  # subpackage of horovod_topk, such as "ddp"
    part: Any = ""  # as of the state behind it, where ranks have shards of gradients
    method: ClassVar[type[Method]]
    config: Method
    deferred: Mapping[str, str]  # settings that are decided once the optimizer is known

    def __init_subclass__(cls, method: type[Method] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if method is not None:
            cls.method = method
            cls.__doc__ = documentation(method, cls)
            cls.__signature__ = _signature(method)  # type: ignore[attr-defined]

    def __init__(self, *positional: Any, grad_scaler: Any = None, **settings: Any) -> None:
        method, name = self.method, type(self).__name__
        first = inspect.signature(type(self)).bind_partial(*positional).arguments
        settings = dict(**first, **settings)
        put = substitute()
        if put is not None and not put.is_horovods:
            check_replaceable(settings)
            announce(str(put), name)
            method, name, settings = METHODS[put.name], put.name, dict(put.settings)
        self._check_scaler(grad_scaler)
        self.grad_scaler = grad_scaler
        settings = {**method.for_training, **settings}
        known, self.deferred = fields_of(method, settings, name, "grad_scaler")
        self.config = method(**known)

    def __repr__(self) -> str:
        """The call that makes this compressor: settings that are not the defaults."""
        method = type(self.config)
        needed = {each.name: getattr(self.config, each.name) for each in fields(method)}
        chosen = {n: each for n, each in method.for_training.items() if n not in self.deferred}
        if needed.get("ratios"):
            chosen.pop("ratio", None)
        for name in sorted(needed, reverse=True):
            rest = {each: needed[each] for each in needed if each != name}
            with suppress(ConfigError):
                if name not in chosen and method(**rest) == self.config:
                    needed = rest
        found = written(needed, self.config)
        found |= {n: how for n, how in self.deferred.items() if method.for_training.get(n) != how}
        if self.grad_scaler is not None:
            found["grad_scaler"] = self.grad_scaler
        order = [each for each in _signature(method).parameters if each in found]
        names = {each: name for name, each in METHODS.items()}
        name = type(self).__name__ if method is self.method else names[method]
        return call(name, {each: found[each] for each in order})

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: a copied or unpickled compressor has no optimizer yet."""
        return {setting: getattr(self, setting) for setting in _SETTINGS}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the same scaler: a copy of it would not follow the loss's scale."""
        memo.setdefault(id(self.grad_scaler), self.grad_scaler)
        copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @classmethod
    def named(cls, name: str, module: str) -> type[Self]:
        """Create the compressor class of a method in `horovod_topk.methods.METHODS`.

        module: module that users import it from, such as `horovod_topk.torch`.
        """
        if name not in METHODS:
            near = {each.lower(): each for each in METHODS}
            found = difflib.get_close_matches(name.lower(), near, n=1, cutoff=0.7)
            if found and not name.startswith("_"):
                raise AdapterImportError(
                    f"{module} has no {name!r}", cure=f"Import {near[found[0]]}"
                )
            raise AttributeError(
                f"{module} has no {name!r}; its compressors are {', '.join(METHODS)}"
            )
        body = {"__module__": module}
        return types.new_class(name, (cls,), {"method": METHODS[name]}, lambda ns: ns.update(body))

    @classmethod
    def module_functions(
        cls, module: dict[str, Any]
    ) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
        """`__getattr__` and `__dir__` of an adapter: each compressor is made when it is imported.

        module: the adapter's `globals()`.
        """

        def find(name: str) -> Any:
            module[name] = made = cls.named(name, module["__name__"])
            return made

        return find, lambda: sorted({*module, *METHODS})

    @classmethod
    def asked(cls, compression: object) -> Self | None:
        """Return the compressor of this package that was passed as `compression=`, if it is one.

        Returns None for one of Horovod's compressors, and if an environment variable has Horovod's
        own compression serve the optimizer instead.
        """
        cls._check_is_compressor(compression)
        kind: type[Self]
        made: Self | None = None
        if isinstance(compression, cls):
            kind, made = type(compression), compression
        elif isinstance(compression, type) and issubclass(compression, cls):
            kind = compression
        else:
            return None
        put = substitute()
        if put is not None and put.is_horovods:
            if made is not None:
                own = made.config
                check_replaceable({"momentum": own.momentum, "clip_norm": own.clip_norm})
            announce(str(put), kind.__name__)
            return None
        return kind() if made is None else made

    @classmethod
    def _check_is_compressor(cls, compression: Any) -> None:
        kind = compression if isinstance(compression, type) else type(compression)
        known = kind.__name__ if kind.__name__ in METHODS else "TopKEF"
        right = f"Write from horovod_topk.{cls.adapter} import {known}, and pass {known}"
        if issubclass(kind, BaseCompressor) and not issubclass(kind, cls):
            raise ConfigError(
                f"compression={kind.__name__} is of horovod_topk.{kind.adapter}, and was passed to "
                f"an optimizer of horovod_topk.{cls.adapter}",
                cure=right,
            )
        if not issubclass(kind, cls) and not hasattr(compression, "compress"):
            raise ConfigError(
                f"compression={compression!r:.60} is no compressor",
                cure=f"{right}, or {known}(...) with settings; hvd.Compression.none is dense",
            )

    @classmethod
    def _is_not_attached(cls, *model: Any, **others: Any) -> Any:
        """Refuse: only the compressors of `horovod_topk.ddp` are attached to a model."""
        raise ConfigError(
            f"horovod_topk.{cls.adapter}.{cls.__name__} is passed to Horovod, as compression=",
            cure=f"For DistributedDataParallel write from horovod_topk.ddp import {cls.__name__}",
        )

    attach: ClassVar[Any] = _is_not_attached
    hook: ClassVar[Any] = _is_not_attached

    active = Forwarded()
    rank_and_ranks = Forwarded()
    ratio = Forwarded()
    reduction = Forwarded()
    steps = Forwarded()
    tensors = Forwarded()
    state_dict = Forwarded()
    load_state_dict = Forwarded()
    reset = Forwarded()
    residual = Forwarded()
    set_ratio = Forwarded()
    stats = Forwarded()
    on_step = Forwarded()
    probe = Forwarded()
    report = Forwarded()

    @property
    def behind(self) -> Attached[Any]:
        """The error-feedback state of the one optimizer that uses this instance."""
        if name := horovods():
            return ByHorovod(name, self.framework)
        if len(self._living_states()) > 1:
            gc.collect()  # Horovod's optimizers are reference cycles
        states = self._living_states()
        if len(states) != 1:
            raise NotAttachedError(
                f"{len(states)} optimizers use this TopKEF, exactly one was expected",
                cure="Ask TopKEF.of(optimizer) for the state behind one optimizer",
            )
        return states[0]

    def _begin(self) -> None:  # noqa: B027  # a subclass may have nothing to set
        """Set the attributes of a compressor that no optimizer uses yet."""

    @staticmethod
    @abc.abstractmethod
    def _check_scaler(scaler: object) -> None:
        """Raise ConfigError if `scaler` cannot be used as `grad_scaler=`."""

    @abc.abstractmethod
    def _living_states(self) -> Sequence[Attached[Any]]:
        """States of the optimizers that use this instance, oldest first."""


class OverHorovod(BaseCompressor):
    """A compressor that users pass to Horovod, with the methods of Horovod's own compressors."""

    horovod: ClassVar[Any]  # its module for the framework
    takers: ClassVar[str]  # what takes this compressor, for an error

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Refuse to compress a single tensor: a tensor outside an optimizer has no residual.

        Where the environment asks for Horovod's own compression, it compresses the tensor.
        """
        if name := horovods():
            return getattr(cls.horovod.Compression, name).compress(tensor)  # type: ignore[no-any-return]
        raise OutsideOptimizerError(
            f"TopKEF was asked to compress one tensor of shape {list(tensor.shape)} by itself",
            cure=f"Pass it to {cls.takers}, not to hvd.allreduce",
        )

    @classmethod
    def decompress(cls, tensor: Any, ctx: object) -> Any:
        """Return the tensor as it is: gradients are decoded before Horovod calls this.

        Where the environment asks for Horovod's own compression, it decompresses the tensor.
        """
        if name := horovods():
            return getattr(cls.horovod.Compression, name).decompress(tensor, ctx)
        return tensor


def call(name: str, settings: Mapping[str, object]) -> str:
    """Write the call of a compressor, schedule or guard with these settings in Python."""
    return f"{name}({', '.join(f'{key}={_written(value)}' for key, value in settings.items())})"


def _written(value: Any) -> str:
    if is_dataclass(value):
        own = {each.name: (getattr(value, each.name), each.default) for each in fields(value)}
        given = {name: mine for name, (mine, default) in own.items() if mine != default}
        return call(type(value).__name__, given)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_written(each)}: {value[each]!r}' for each in value)}}}"
    if isinstance(value, Predicate):
        return getattr(value.function, "__qualname__", repr(value.function))
    return repr(value)


def documentation(method: type[Method], compressor: type) -> str:
    """A compressor's docstring, built from its method's, `Settings`' and its base class's."""
    described = [inspect.getdoc(each) or "" for each in (method, Settings, compressor.__mro__[1])]
    (text, own, source), (_, shared, _), (usage, more, raises) = map(_sections, described)
    usage = usage.partition("\n\n")[2]  # its first line describes the base class
    arguments = "\n".join((shared | own | more).values())
    return "\n\n".join(
        part for part in (text, usage, f"Args:\n{arguments}", raises, source) if part
    )


def _sections(text: str) -> tuple[str, dict[str, str], str]:
    """Split a docstring into the text before its arguments, each argument, and the rest."""
    before, _, rest = text.partition("\nArgs:\n")
    arguments, _, after = rest.partition("\n\n")
    each = re.split(r"\n(?=    \w)", arguments.rstrip()) if arguments else []
    return before.strip(), {one.split(":")[0]: one for one in each}, after.strip()


def _signature(method: type[Method]) -> inspect.Signature:
    keyword, own = inspect.Parameter.KEYWORD_ONLY, list[inspect.Parameter]()
    of_method = dict(inspect.signature(method).parameters)
    if "ratio" not in of_method:
        of_method["ratio"] = inspect.Parameter("ratio", keyword, default=None)
    for position, (name, each) in enumerate(of_method.items()):
        default = method.for_training.get(name, each.default)
        kind = each.kind if position == 0 else keyword
        if name not in FOLDED:
            own.append(each.replace(kind=kind, default=default))
    return inspect.Signature([*own, inspect.Parameter("grad_scaler", keyword, default=None)])
