"""Compression between the nodes of a model that PyTorch's `fully_shard` (FSDP2) has sharded.

    from torch.distributed.fsdp import fully_shard
    from horovod_topk.fsdp import TopKEF

    mesh = init_device_mesh("cuda", (nodes, ranks_a_node), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    TopKEF().attach(model, optimizer, between=mesh["replicate"])

FSDP2 adds gradients up within a node and shards them. Every rank then exchanges its shard with the
ranks of other nodes that have the same one. `TopKEF.of(model)` returns the state. Horovod is not
needed, and nothing of PyTorch is patched.
"""

from horovod_topk.errors import AdapterImportError

try:
    from torch.distributed.fsdp import fully_shard  # noqa: F401  # PyTorch 2.6
except ImportError as error:
    raise AdapterImportError(
        f"horovod_topk.fsdp is for PyTorch's fully_shard, which cannot be imported: {error}",
        cure="pip install 'torch>=2.6'",
    ) from error

from horovod_topk.fsdp.compressor import Compressor, TopKEF
from horovod_topk.fsdp.state import FSDPState
from horovod_topk.guard import Guard

__all__ = ["FSDPState", "Guard", "TopKEF"]

__getattr__, __dir__ = Compressor.module_functions(globals())  # for other compressor classes
