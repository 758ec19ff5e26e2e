"""The canary: fails loudly when Horovod changes under the seam, or the seam touches more.

`horovod_topk/torch/seam.py` wraps five functions of Horovod and `state.py` relies on private
fields that those and their neighbours keep. Their source is compared with 0.28.1's, as parsed, so
neither comments nor layout matter.
"""

from __future__ import annotations

import re

import pytest
from oracle.canary import HOROVOD, Function, functions, inspect_import

SEAM = {
    "horovod.torch.optimizer._DistributedOptimizer.__init__",
    "horovod.torch.optimizer._DistributedOptimizer._allreduce_grad_async",
    "horovod.torch.optimizer._DistributedOptimizer.synchronize",
    "horovod.torch.optimizer._DistributedAdasumOptimizer.__init__",
    "horovod.torch.join",
}

SIGNATURES = {
    "_DistributedOptimizer.__init__": (
        "self, params, named_parameters, compression, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, groups=None, sparse_as_dense=False, "
        "process_set=global_process_set"
    ),
    "_DistributedOptimizer._allreduce_grad_async": "self, p",
    "_DistributedOptimizer.load_state_dict": "self, *args, **kwargs",
    "_DistributedOptimizer.step": "self, closure=None",
    "_DistributedOptimizer.synchronize": "self",
    "_DistributedAdasumOptimizer.__init__": (
        "self, params, named_parameters, compression, backward_passes_per_step=1"
    ),
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, "
        "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, "
        "groups=None, sparse_as_dense=False, process_set=global_process_set"
    ),
    "join": "device=-1",
    "allgather_async": "tensor, name=None, process_set=global_process_set",
    "synchronize": "handle",
}

# What we rely on in each, for whoever meets a failure here.
RELIED_ON = {
    "_DistributedOptimizer.__init__": (
        "sets _parameter_names, op, gradient_predivide_factor, sparse_as_dense, process_set, "
        "_groups and _handles, and calls _register_hooks last, by which only parameters change"
    ),
    "_DistributedOptimizer.load_state_dict": "replaces _handles, which drops a step under way",
    "_DistributedOptimizer.find_duplicates": "refuses duplicate names before our plan is made",
    "_DistributedOptimizer.set_backward_passes_per_step": "resets _allreduce_delay",
    "_DistributedOptimizer._register_hooks": (
        "fills _grad_accs and _requires_update, one hook a parameter that requires a gradient, "
        "once _groups is None; of a number of groups it makes split_list, as we do"
    ),
    "_DistributedOptimizer._allreduce_grad_async": (
        "takes one parameter and returns (handle or callable, ctx); we answer for ours"
    ),
    "_DistributedOptimizer._grouped_allreduce_grad_async": "is never reached once _groups is None",
    "_DistributedOptimizer._sparse_allreduce_grad_async": "is left to sparse gradients, untouched",
    "_DistributedOptimizer._make_hook": (
        "calls _allreduce_grad_async when _allreduce_delay[p] has come down to 0"
    ),
    "_DistributedOptimizer.synchronize": (
        "calls _allreduce_grad_async for parameters without a handle, then a callable handle once "
        "a parameter, and sets p.grad to what decompress makes of it"
    ),
    "_DistributedOptimizer.skip_synchronize": "sets _should_synchronize for as long as it is open",
    "_DistributedOptimizer.step": "synchronizes if _should_synchronize, then steps the base class",
    "_DistributedOptimizer.zero_grad": "refuses while there are handles",
    "_DistributedAdasumOptimizer.__init__": "changes gradients; we refuse before it",
    "DistributedOptimizer": "copies dict(_DistributedOptimizer.__dict__) at every call",
    "join": "is looked up as horovod.torch.join by users",
    "allgather_async": "takes a name and a process set and does not block",
    "synchronize": "waits for a handle and returns the gathered tensor",
}

DIGESTS = {
    "_DistributedOptimizer.__init__": "ad2d998991823ace",
    "_DistributedOptimizer.load_state_dict": "70f11d8aa900f42d",
    "_DistributedOptimizer.find_duplicates": "e549ebcad567a907",
    "_DistributedOptimizer.set_backward_passes_per_step": "58a5dfa8cb82d671",
    "_DistributedOptimizer._register_hooks": "394087d5267c566a",
    "_DistributedOptimizer._allreduce_grad_async": "95db9ed9b306aaa7",
    "_DistributedOptimizer._grouped_allreduce_grad_async": "06c1d71ea9e6b0fc",
    "_DistributedOptimizer._sparse_allreduce_grad_async": "7979d0bfbcb0f567",
    "_DistributedOptimizer._make_hook": "564138fd4b83153d",
    "_DistributedOptimizer.synchronize": "5e3e8f72f68fe03c",
    "_DistributedOptimizer.skip_synchronize": "e328c3c307593918",
    "_DistributedOptimizer.step": "03b8788506354536",
    "_DistributedOptimizer.zero_grad": "10959a8d9ce633be",
    "_DistributedAdasumOptimizer.__init__": "7f1b7bfe0550b516",
    "DistributedOptimizer": "0bdf2bd6f58be5e4",
    "join": "d473703ae55dd53c",
    "allgather_async": "8baf0606be08049c",
    "synchronize": "4f1d7b173645ce47",
}

KEPT_BY_INIT = (
    "_allreduce_delay",
    "_compression",
    "_groups",
    "_grad_accs",
    "_handles",
    "_parameter_names",
    "_requires_update",
    "_should_synchronize",
    "op",
    "process_set",
    "sparse_as_dense",
)


def changes(found: dict[str, Function]) -> list[str]:
    """What differs from Horovod 0.28.1, with what to look at."""
    report = []
    for name, relied_on in RELIED_ON.items():
        if name not in found:
            report.append(f"{name} is gone; it {relied_on}")
        elif found[name].digest != DIGESTS[name]:
            report.append(f"{name} changed; check that it still {relied_on}")
        signature = found[name].signature if name in found else None
        if name in SIGNATURES and signature not in (None, SIGNATURES[name]):
            report.append(f"{name}({signature}); it was ({SIGNATURES[name]})")
    known = {name for name in RELIED_ON if name.startswith("_DistributedOptimizer.")}
    methods = {name for name in found if name.startswith("_DistributedOptimizer.")}
    report += [f"{name} is new; check that no path goes around us" for name in methods - known]
    return report


def source(name: str) -> str:
    return (HOROVOD / "torch" / name).read_text()


def installed() -> dict[str, Function]:
    return functions(source("optimizer.py"), source("mpi_ops.py"))


def test_horovod_is_as_the_seam_expects() -> None:
    version = re.search(r"__version__ = '(.*)'", (HOROVOD / "__init__.py").read_text())
    report = changes(installed())
    assert not report, (
        f"Horovod {version[1] if version else '?'} differs from 0.28.1 where horovod_topk hooks "
        "into it. Read each function below, adapt horovod_topk/torch/, run tests/distributed, and "
        "only then update this file:\n  " + "\n  ".join(report)
    )


def test_fields_that_we_read_are_set_by_init() -> None:
    body = installed()["_DistributedOptimizer.__init__"].lines
    missing = [name for name in KEPT_BY_INIT if f"self.{name} =" not in body]
    assert not missing


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("self._handles.clear()", "self._handles = {}", "synchronize changed"),
        ("def _make_hook(self, p)", "def _make_hook(self, p, q)", "_make_hook changed"),
        ("def load_state_dict(self, *args", "def load(self, *args", "load_state_dict is gone"),
        ("groups=None,\n                 sparse", "sparse", "it was (self, params"),
        ("def zero_grad(self)", "def zero_gradients(self)", "zero_gradients is new"),
        ("self._starting_models = {", "self._models = {", "_DistributedAdasumOptimizer.__init__"),
        ("dict(_DistributedOptimizer.__dict__)", "{}", "DistributedOptimizer changed"),
    ],
)
def test_canary_notices_a_change(old: str, new: str, expected: str) -> None:
    text = source("optimizer.py")
    assert old in text
    report = changes(functions(text.replace(old, new), source("mpi_ops.py")))
    assert any(expected in line for line in report), report


def test_canary_ignores_comments_blank_lines_and_docstrings() -> None:
    text = source("optimizer.py")
    text = text.replace("# Form groups", "# Make groups\n\n            # of them")
    text = text.replace("A context manager used to specify", "Says")
    assert text.count("\n") == source("optimizer.py").count("\n") + 2
    assert changes(functions(text, source("mpi_ops.py"))) == []


@pytest.fixture(scope="module")
def inspection() -> dict[str, object]:
    return inspect_import(
        "horovod_topk.torch.seam",
        "horovod.torch.optimizer._DistributedOptimizer.__init__",
        *(f"horovod.torch{name}" for name in ("", ".optimizer", ".functions", ".elastic")),
    )


def test_import_patches_the_seam_and_nothing_else(inspection: dict[str, object]) -> None:
    changed = set(inspection["import"])
    assert changed == SEAM
    assert inspection["checked"] > 500  # Horovod was really looked at


def test_install_is_idempotent(inspection: dict[str, object]) -> None:
    assert inspection["install"] == []
    assert inspection["unwraps"]


def test_wrappers_keep_name_and_docstring(inspection: dict[str, object]) -> None:
    assert inspection["names"] == ["__init__", True]
