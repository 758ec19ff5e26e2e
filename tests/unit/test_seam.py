"""The canaries: fail loudly when Horovod changes under a seam, or a seam touches more.

The adapters wrap a few functions of Horovod, and rely on private fields that those and their
neighbours keep. Their source is compared with 0.28.1's, without comments and blank lines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from oracle.canary import HOROVOD, functions, inspect_import


@dataclass(frozen=True)
class Canary:
    """What an adapter relies on in Horovod.

    Attributes:
        files: that define the functions.
        seen: each function and its digest; and what is relied on, for whoever meets a failure.
        whole: a class whose methods are all in `seen`.
        wrapped: functions that the adapter's seam replaces; the first has its name and docstring.
        modules: Horovod's, that are imported before the seam.
    """

    files: tuple[str, ...]
    seen: Mapping[str, str]
    whole: str = "-"
    wrapped: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def changes(self, old: str = "", new: str = "") -> list[str]:
        """List the differences from Horovod 0.28.1, after a replacement in its source if asked."""
        texts = [(HOROVOD / name).read_text() for name in self.files]
        assert any(old in text for text in texts)
        found = functions(*(text.replace(old, new) if old else text for text in texts))
        now = {f"{name} {each.digest}" for name, each in found.items()}
        changed = (key for key in self.seen if key not in now)
        known = {key.split()[0] for key in self.seen}
        methods = {name for name in found if name.startswith(f"{self.whole}.")}
        return [
            *(f"{key.split()[0]}: check that it still {self.seen[key]}" for key in changed),
            *(f"{name}: is new" for name in methods - known),
        ]


TORCH = Canary(
    ("torch/optimizer.py", "torch/mpi_ops.py"),
    {
        "_DistributedOptimizer.__init__ ad2d998991823ace": (
            "sets _parameter_names, op, gradient_predivide_factor, sparse_as_dense, process_set, "
            "_groups and _handles, and calls _register_hooks last, by which only parameters "
            "change"
        ),
        "_DistributedOptimizer.load_state_dict 70f11d8aa900f42d": (
            "replaces _handles, which drops a step under way"
        ),
        "_DistributedOptimizer.find_duplicates e549ebcad567a907": (
            "refuses duplicate names before our plan is made"
        ),
        "_DistributedOptimizer.set_backward_passes_per_step 58a5dfa8cb82d671": (
            "resets _allreduce_delay"
        ),
        "_DistributedOptimizer._register_hooks 394087d5267c566a": (
            "fills _grad_accs and _requires_update, one hook a parameter that requires a "
            "gradient, once _groups is None; of a number of groups it makes split_list, as we do"
        ),
        "_DistributedOptimizer._allreduce_grad_async 95db9ed9b306aaa7": (
            "takes one parameter and returns (handle or callable, ctx); we answer for ours"
        ),
        "_DistributedOptimizer._grouped_allreduce_grad_async 06c1d71ea9e6b0fc": (
            "is never reached once _groups is None"
        ),
        "_DistributedOptimizer._sparse_allreduce_grad_async 7979d0bfbcb0f567": (
            "is left to sparse gradients, untouched"
        ),
        "_DistributedOptimizer._make_hook 564138fd4b83153d": (
            "calls _allreduce_grad_async when _allreduce_delay[p] has come down to 0"
        ),
        "_DistributedOptimizer.synchronize 5e3e8f72f68fe03c": (
            "calls _allreduce_grad_async for parameters without a handle, then a callable handle "
            "once a parameter, and sets p.grad to what decompress makes of it"
        ),
        "_DistributedOptimizer.skip_synchronize e328c3c307593918": (
            "sets _should_synchronize for as long as it is open"
        ),
        "_DistributedOptimizer.step 03b8788506354536": (
            "synchronizes if _should_synchronize, then steps the base class"
        ),
        "_DistributedOptimizer.zero_grad 10959a8d9ce633be": "refuses while there are handles",
        "_DistributedAdasumOptimizer.__init__ 7f1b7bfe0550b516": (
            "changes gradients; we refuse before it"
        ),
        "DistributedOptimizer 0bdf2bd6f58be5e4": (
            "copies dict(_DistributedOptimizer.__dict__) at every call"
        ),
        "join d473703ae55dd53c": "is looked up as horovod.torch.join by users",
        "allgather_async 8baf0606be08049c": "takes a name and a process set and does not block",
        "synchronize 4f1d7b173645ce47": "waits for a handle and returns the gathered tensor",
    },
    "_DistributedOptimizer",
    (
        "horovod.torch.optimizer._DistributedOptimizer.__init__",
        "horovod.torch.optimizer._DistributedOptimizer._allreduce_grad_async",
        "horovod.torch.optimizer._DistributedOptimizer.synchronize",
        "horovod.torch.optimizer._DistributedAdasumOptimizer.__init__",
        "horovod.torch.join",
    ),
    tuple(f"horovod.torch{name}" for name in ("", ".optimizer", ".functions", ".elastic")),
)
TENSORFLOW = Canary(
    (
        "tensorflow/__init__.py",
        "tensorflow/mpi_ops.py",
        "tensorflow/gradient_aggregation.py",
        "tensorflow/gradient_aggregation_eager.py",
        "_keras/__init__.py",
    ),
    {
        "_make_allreduce_grads_fn 184d62245dad0f33": (
            "is where every gradient meets its variable; we answer for ours"
        ),
        "_DistributedGradientTape.__init__ 143b58e1a85bb84a": (
            "looks _make_allreduce_grads_fn up for every tape"
        ),
        "_DistributedGradientTape.gradient bb39b698dff858dc": (
            "calls it with gradients, variables, use_generic_names"
        ),
        "_DistributedOptimizer.__init__ 3c63ae435a41fa5d": (
            "looks it up for TensorFlow 1's optimizers"
        ),
        "_DistributedOptimizer.compute_gradients 10c69f1115b4dbbe": (
            "calls it with gradients and variables"
        ),
        "LocalGradientAggregationHelper._allreduce_grads_helper b927fc7e7163bbb3": (
            "calls it in a condition"
        ),
        "LocalGradientAggregationHelperEager._allreduce_helper f9f15b25dda89b59": (
            "calls it in a condition"
        ),
        "create_distributed_optimizer c706a7e373c437d9": (
            "looks it up in the constructor, and is blind to Keras 3"
        ),
        "join f9e205bcc53b9e6f": "is looked up as horovod.tensorflow.join by users",
        "allgather 2b12a5a59f235644": "takes a name, ignore_name_scope and a process set",
    },
    wrapped=(
        "horovod.tensorflow._make_allreduce_grads_fn",
        "horovod._keras.create_distributed_optimizer",
        "horovod.tensorflow.join",
    ),
    modules=(
        *(f"horovod.tensorflow{name}" for name in ("", ".keras", ".functions", ".elastic")),
        "horovod.tensorflow.gradient_aggregation",
        "horovod._keras",
    ),
)
PROCESS_SETS = Canary(
    ("common/basics.py", "common/process_sets.py"),
    {
        "HorovodBasics._get_process_set_ids_and_ranks 587eb80405c12aff": "gives ranks by number",
        "HorovodBasics._remove_process_set_impl 6e12586f5f0e569b": (
            "raises ValueError unless process sets are dynamic, and returns None if there is none"
        ),
        "add_process_set 82ec4e759e81feaf": "adds one of a list of ranks and returns it",
        "remove_process_set eecb7a9353f28b66": (
            "asks _remove_process_set_impl for the number of the object"
        ),
    },
)


@pytest.mark.parametrize("canary", [TORCH, TENSORFLOW, PROCESS_SETS])
def test_horovod_is_as_the_adapters_expect(canary: Canary) -> None:
    report = canary.changes()
    assert not report, (
        "Horovod differs from 0.28.1 where horovod_topk hooks into it. Read each function below, "
        "adapt the adapter, run tests/distributed, and only then update this file:\n  "
        + "\n  ".join(report)
    )


@pytest.mark.parametrize(
    ("canary", "old", "new", "expected"),
    [
        (TORCH, "self._handles.clear()", "self._handles = {}", "synchronize: check"),
        (TORCH, "def zero_grad(self)", "def zero_gradients(self)", "zero_gradients: is new"),
        (TORCH, "self._starting_models = {", "self._models = {", "AdasumOptimizer.__init__"),
        (TORCH, "dict(_DistributedOptimizer.__dict__)", "{}", "DistributedOptimizer: check"),
        (TENSORFLOW, "groups = vars_to_refs(groups)", "groups = list(groups)", "_make_allreduce_"),
        (TENSORFLOW, "def join(", "def leave(", "join: "),
    ],
)
def test_a_canary_notices_a_change(canary: Canary, old: str, new: str, expected: str) -> None:
    report = canary.changes(old, new)
    assert any(expected in line for line in report), report


def test_a_canary_ignores_comments_blank_lines_and_docstrings() -> None:
    for old, new in (
        ("# Form groups", "# Make groups\n\n            # of them"),
        ("A context manager used to specify", "Says"),
    ):
        assert TORCH.changes(old, new) == []


@pytest.mark.parametrize(("name", "canary"), [("torch", TORCH), ("tensorflow", TENSORFLOW)])
def test_import_patches_the_seam_and_nothing_else(name: str, canary: Canary) -> None:
    """Once, and with wrappers that keep name and docstring."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    found = inspect_import(f"horovod_topk.{name}.seam", canary.wrapped[0], *canary.modules)
    assert set(found["import"]) == {*canary.wrapped}
    assert found["checked"] > 300  # Horovod was really looked at
    assert found["install"] == [] and found["unwraps"]
    assert found["names"] == [canary.wrapped[0].rpartition(".")[2], True]
