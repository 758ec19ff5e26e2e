"""A small byte CNN that tells which package of Python's standard library 64 bytes come from.

    horovodrun -np 2 --gloo python examples/pytorch_snippets.py --compression topk

It reports accuracy on snippets of held-out files. Whole files are held out, so the network has to
recognise a package by its style and vocabulary.
"""

from __future__ import annotations

import harness
import horovod.torch as hvd
import source_files
import torch
import torch_harness
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

PACKAGES = (
    "asyncio",
    "distutils",
    "email",
    "encodings",
    "importlib",
    "multiprocessing",
    "unittest",
    "xml",
)
LENGTH = 64  # bytes a snippet


class SnippetCNN(nn.Module):
    """Bytes [N, LENGTH] -> logits [N, len(PACKAGES)]; 227 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, 32)
        self.body = nn.Sequential(
            nn.Conv1d(32, 128, 5),
            nn.ReLU(),
            nn.MaxPool1d(4),
            nn.Conv1d(128, 256, 5),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, len(PACKAGES)),
        )

    def forward(self, snippets: Tensor) -> Tensor:
        return self.body(self.byte(snippets).transpose(1, 2))


def of_package(package: str, split: str, count: int) -> Tensor:
    """`count` snippets of a package's files of a split, evenly spread: [count, LENGTH]."""
    files = source_files.of_split(split, source_files.STANDARD_LIBRARY / package)
    snippets = torch.cat(
        [
            torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).unfold(0, LENGTH, 8)
            for path in files
            if path.stat().st_size >= LENGTH
        ]
    )
    rows = torch.linspace(0, len(snippets) - 1, count).long()
    return snippets[rows].long()


def snippets(split: str, per_package: int) -> tuple[Tensor, Tensor]:
    """Snippets [N, LENGTH] and the indices of their packages [N], as many of each package."""
    texts = [of_package(package, split, per_package) for package in PACKAGES]
    labels = torch.arange(len(PACKAGES)).repeat_interleave(per_package)
    return torch.cat(texts), labels


def main() -> None:
    parser = harness.arguments(__doc__, steps=1000, batch_size=16, lr=0.05)
    harness.add_evaluation(parser, every=50)
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    torch.set_num_threads(harness.threads(hvd.local_size()))
    torch.manual_seed(args.seed)

    model = SnippetCNN()
    optimizer = hvd.DistributedOptimizer(
        torch_harness.optimizer(args, model),
        named_parameters=model.named_parameters(),
        compression=torch_harness.compression(args),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = LambdaLR(optimizer, harness.warmup_cosine(args.steps))

    def correct(texts: Tensor, labels: Tensor) -> Tensor:
        return model(texts).argmax(dim=1) == labels

    unseen = snippets(args.evaluate_on, per_package=250)
    training = snippets("training", per_package=16_000)

    run = torch_harness.Run(args, model, optimizer)
    batches = torch_harness.batches(*training, batch_size=args.batch_size, seed=args.seed)
    for texts, labels in run.steps(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(texts), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.stepped(loss.item()):
            run.evaluated(accuracy=torch_harness.mean_over_rows(correct, *unseen))
    run.finish()


if __name__ == "__main__":
    main()
