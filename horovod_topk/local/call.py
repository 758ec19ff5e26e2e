"""Local steps as text: `LocalSteps(TopKEF(ratio=0.02, momentum=0), every=30)`.

The first argument is a compressor, or the name of a preset in quotes; without it the compressor is
that of `LocalSteps` without one. The keywords are the settings of
`horovod_topk.local.settings.LocalConfig`. The text is parsed and never evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod_topk.config import check_settings
from horovod_topk.core.run import substitute
from horovod_topk.core.run.substitute import Substitute
from horovod_topk.errors import ConfigError
from horovod_topk.local.settings import USUAL, LocalConfig, Outer, preset_of
from horovod_topk.methods import METHODS

NAME = "LocalSteps"


@dataclass(frozen=True)
class LocalCall:
    """Local steps: the compressor of movements, and the settings that were given."""

    compressor: Substitute
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """The call as text that `parse` reads; presets are written out."""
        settings = (f"{name}={value!r}" for name, value in self.settings.items())
        return f"{NAME}({', '.join([str(self.compressor), *settings])})"

    @property
    def config(self) -> LocalConfig:
        """All settings."""
        return LocalConfig.of(self.settings)


def parse(text: str) -> Substitute | LocalCall:
    """Parse a setting to compare: a compressor such as "TopKEF()", or a "LocalSteps(...)"."""
    call = _local(text)
    if call is None:
        return substitute.parse(text)
    if len(call.args) > 1:
        raise ConfigError(
            f"{text!r}: the settings of {NAME} have to be named",
            cure=f"Write it as in {NAME}(TopKEF(ratio=0.02, momentum=0), every=30)",
        )
    keywords = ast.Call(call.func, [], call.keywords)
    _, settings = substitute.call_of(ast.unparse(keywords), {"Outer": Outer})
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant):
        preset = preset_of(str(first.value))
        compressor = Substitute(preset.method, preset.compression)
        settings = {**preset.settings, **settings}
    elif first is None:
        compressor = Substitute("TopKEF", USUAL)
    else:
        compressor = substitute.parse(ast.unparse(first))
    if compressor.is_horovods:
        raise ConfigError(
            f"{text!r}: {compressor} is Horovod's own compression of gradients",
            cure="Write Dense or Dense(values='float16')",
        )
    check_settings(METHODS[compressor.name], compressor.settings, compressor.name)
    made = LocalCall(compressor, settings)
    made.config  # noqa: B018  # checks the settings
    return made


def _local(text: str) -> ast.Call | None:
    """The call of `LocalSteps` in a text; None: it is another text."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    is_local = isinstance(node, ast.Call) and ast.unparse(node.func) == NAME
    return node if is_local and isinstance(node, ast.Call) else None
