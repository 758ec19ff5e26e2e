"""scikit-learn's handwritten digits with torch DistributedDataParallel, without Horovod.

    torchrun --nproc-per-node 2 examples/ddp_digits.py --compression topk

It is an ordinary DDP training script with one more import and one more line. In short:

    from horovod_topk.ddp import TopKEF
    TopKEF().attach(model, optimizer)

It reports accuracy on 450 held-out images. `make demo-ddp` runs it, dense and with TopKEF.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import digits_data
import harness
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from horovod_topk.ddp import TopKEF


class DigitsCNN(nn.Sequential):
    """Two convolutions and two dense layers: [N, 1, 8, 8] -> [N, 10], 284 thousand parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )


def digits(split: str) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in [0, 1] and labels [N] of a split, the same in every run."""
    images, labels = digits_data.digits(split)
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)


def batches(size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of this rank's share of the training images for ever."""
    images, labels = digits("training")
    generator = torch.Generator().manual_seed(seed)  # the same shuffles on all ranks
    while True:
        order = torch.randperm(len(images), generator=generator)
        for rows in order[dist.get_rank() :: dist.get_world_size()].split(size):
            yield images[rows], labels[rows]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that are recognized."""
    return float((model(images).argmax(dim=1) == labels).double().mean())


def mean(values: list[float]) -> float:
    """Return the mean of all ranks' values; each rank has the same number of values."""
    total = torch.tensor(values).sum()
    dist.all_reduce(total)
    return float(total) / (len(values) * dist.get_world_size())


def main() -> None:
    parser = harness.arguments(__doc__, steps=600, batch_size=32, lr=0.05)
    harness.add_evaluation(parser, every=20)
    args = harness.parse(parser)
    if args.compression == "fp16" or args.optimizer != "sgd":
        parser.error("this example has SGD, and --compression none or topk")

    dist.init_process_group("gloo")
    torch.set_num_threads(harness.threads(dist.get_world_size()))
    torch.manual_seed(args.seed)

    module = DigitsCNN()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=harness.own_momentum(args))
    if args.compression == "topk":
        TopKEF(**harness.topk_settings(args)).attach(model, optimizer)
    schedule = LambdaLR(optimizer, harness.warmup_cosine(args.steps))

    size = sum(each.numel() * each.element_size() for each in model.parameters())
    dense = harness.ring_bytes(size, dist.get_world_size())

    def describe() -> dict[str, Any]:
        compressed = args.compression == "topk"
        return harness.describe(
            args,
            ranks=dist.get_world_size(),
            parameters=sum(each.numel() for each in model.parameters()),
            sent_bytes=TopKEF.of(model).stats().sent_bytes if compressed else dense,
            dense_bytes=dense,
            versions={"torch": torch.__version__},
        )

    unseen = digits(args.evaluate_on)
    run = harness.Loop(args, dist.get_rank(), describe, mean)
    for images, labels in run.steps(batches(args.batch_size, args.seed)):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.stepped(loss.item()):
            run.evaluated(accuracy=accuracy(module, *unseen))
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
