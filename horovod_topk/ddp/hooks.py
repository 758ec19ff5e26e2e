"""What DistributedDataParallel's users are told of a step on gradients that were not exchanged."""

from __future__ import annotations

from horovod_topk.torch_training.in_backward import BackwardHooks, Refusals

ATTACH = (
    "Call TopKEF().attach(model, optimizer) before backward(). Lightning needs a callback for it, "
    "as it registers ddp_comm_hook= on CUDA devices alone: docs/integrations.md"
)
UNUSED = "If it is frozen or unused, pass find_unused_parameters=True to DistributedDataParallel"
SYNC = "Run a step's last backward() outside of no_sync(), and"


class Hooks(BackwardHooks):
    """Step hooks that refuse gradients whose buckets DDP did not pass to the compressor."""

    refusals = Refusals(
        never=(
            "step() was called, and DistributedDataParallel never called this compressor's hook",
            ATTACH,
        ),
        local=(
            "step() was called on gradients of this rank alone: no backward() has exchanged any",
            f"{SYNC} call the model itself, not its .module",
        ),
        not_now=f"{SYNC} zero_grad() after the step",
        incomplete=UNUSED,
    )
