"""A compressor from an environment variable, which replaces the compressor of a script.

`HOROVOD_TOPK_COMPRESSION` is a compressor in Python syntax, with keywords whose values are
literals: `TopKEF(ratio=0.01)`, `Dense(values="bfloat16")`; a schedule or guard is written in the
same way, `TopKEF(schedule=Accordion(critical=0.1))`. `none` and `fp16` are Horovod's own
compression of these names. The text is parsed and never evaluated. While the variable is set, it
replaces every compressor of this package, with a line in the log. Other compressors that a script
passes to Horovod are not replaced.

The script's `grad_scaler=` is kept. All other settings of the script's compressor are replaced;
`momentum=0.9` and `clip_norm=` are refused, since the script's optimizer applies neither.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod_topk import reporting
from horovod_topk.config import AUTO, check_settings, is_pair
from horovod_topk.errors import ConfigError
from horovod_topk.guard import Guard
from horovod_topk.methods import METHODS
from horovod_topk.schedules import SCHEDULES

VARIABLE = "HOROVOD_TOPK_COMPRESSION"
HOROVODS = ("none", "fp16")  # hvd.Compression.none and .fp16

log = logging.getLogger("horovod_topk")


@dataclass(frozen=True)
class Substitute:
    """A compressor by its name, and its settings."""

    name: str  # a key of METHODS, or one of HOROVODS
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """The compressor as text that `parse` reads."""
        if self.name in HOROVODS:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"

    @property
    def is_horovods(self) -> bool:
        """Whether Horovod's own code exchanges the gradients."""
        return self.name in HOROVODS


def parse(text: str) -> Substitute:
    """Parse a compressor, such as "TopKEF(ratio=0.01)"."""
    if text.strip() in HOROVODS:
        return Substitute(text.strip(), {})
    name, settings = call_of(text, {**SCHEDULES, "Guard": Guard})
    if name not in METHODS:
        known = ", ".join([*HOROVODS, *METHODS])
        raise ConfigError(
            f"{text!r}: there is no compressor {name!r}", cure=f"Write one of {known}"
        )
    check_settings(METHODS[name], settings, name)
    return Substitute(name, settings)


def call_of(text: str, kinds: Mapping[str, type]) -> tuple[str, dict[str, Any]]:
    """The name and the keywords of a call, or of a name alone.

    kinds: classes by name whose objects may be values: their settings are literals.
    """
    cure = "Write it as in TopKEF(ratio=0.01, values='int8'): keywords, with literals as values"
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{text!r} is not a compressor ({error})", cure=cure) from error
    if isinstance(node, ast.Name):
        return node.id, {}
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise ConfigError(f"{text!r} is not a compressor with keyword arguments", cure=cure)
    settings: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in settings:
            raise ConfigError(f"{text!r}: each setting has to be named once", cure=cure)
        try:
            settings[keyword.arg] = _value(keyword.value, kinds)
        except ConfigError:  # of an object's settings, whose error names them
            raise
        except (TypeError, ValueError) as error:
            value = ast.unparse(keyword.value)
            problem = f"{keyword.arg}={value} is not a literal ({error})"
            raise ConfigError(problem, cure=cure) from error
    return node.func.id, settings


def _value(node: ast.expr, kinds: Mapping[str, type]) -> Any:
    """Evaluate a literal, or an object of a known class with literals as settings."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    kind = kinds.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if kind is None or node.args:
        raise ValueError(f"{ast.unparse(node)} is none of {', '.join(kinds)}")
    return kind(**{str(each.arg): ast.literal_eval(each.value) for each in node.keywords})


def substitute() -> Substitute | None:
    """Return the compressor in the environment variable; None: it is not set."""
    text = os.environ.get(VARIABLE)
    return None if text is None else _parsed(text)


_parsed = functools.cache(parse)


def horovods() -> str | None:
    """Return the name of Horovod's own compression, if the environment variable names one."""
    asked = substitute()
    return asked.name if asked is not None and asked.is_horovods else None


@functools.cache
def announce(asked: str, script: str) -> None:
    """Log once that a script's compressor is replaced."""
    if reporting.launched_rank() in (None, 0):
        log.warning("%s=%s takes the place of the script's %s", VARIABLE, asked, script)
    reporting.note("compressor", used=asked, script=script)


def check_replaceable(settings: Mapping[str, Any]) -> None:
    """Refuse to replace a compressor that applies momentum or clipping for the script."""
    momentum = settings.get("momentum", 0)
    if is_pair(momentum) or momentum not in (0, AUTO):
        raise ConfigError(
            f"{VARIABLE} replaces the script's compressor, whose momentum={momentum!r} its "
            "optimizer does without",
            cure="Give the optimizer its momentum, and leave momentum= out of the compressors that "
            "are compared",
        )
    if settings.get("clip_norm") is not None:
        raise ConfigError(
            f"{VARIABLE} replaces the script's compressor, and clip_norm={settings['clip_norm']!r} "
            "with it, so that dense gradients would not be clipped",
            cure="Clip in the script, or leave clip_norm out",
        )
