"""Measure the images a second of a ResNet on random images, as Horovod's benchmark of this name.

    horovodrun -np 2 --gloo python examples/pytorch_synthetic_benchmark.py --compression topk
    horovodrun -np 8 -H ... python examples/pytorch_synthetic_benchmark.py \
        --model resnet50 --image-size 224 --batch-size 32 --device cuda

Each iteration times five steps. The result is the mean over the iterations with a 95% interval.
The defaults are for a CPU: a shallower network and small images. The gradients of `resnet50` have
the shapes of ResNet-50 (25,557,032 parameters), whatever the size of the images.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import harness
import horovod.torch as hvd
import torch
import torch_harness
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from tqdm import trange

STEPS_PER_ITERATION = 5
BLOCKS = {"resnet26": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (but for its stride), with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: [N, inputs, H, W] -> [N, 4 width, ...]."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, 4 * width, 1),
        )
        same_shape = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same_shape else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.residual(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], classes: int = 1000) -> nn.Sequential:
    """A residual network (He et al. 2016) with so many bottleneck blocks in each stage."""
    layers: list[nn.Module] = [
        convolution(3, 64, 7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            layers.append(Bottleneck(inputs, width, stride=2 if block == 0 and stage else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def seconds_per_step(step: Callable[[], None], iterations: int) -> list[float]:
    """The mean time of a step in each iteration."""
    seconds = []
    for _ in trange(iterations, unit="iteration", disable=hvd.rank() != 0):
        started = time.perf_counter()
        for _ in range(STEPS_PER_ITERATION):
            step()
        seconds.append((time.perf_counter() - started) / STEPS_PER_ITERATION)
    return seconds


def summary(rates: list[float], result: dict[str, object]) -> str:
    """Images a second, a rank and in all."""
    mean = statistics.mean(rates)
    interval = 1.96 * statistics.pstdev(rates)
    return (
        f"images a second and rank: {mean:.1f} +- {interval:.1f}\n"
        f"images a second on {hvd.size()} ranks: {hvd.size() * mean:.1f} "
        f"+- {hvd.size() * interval:.1f}\n"
        f"{harness.traffic(result)}"
    )


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, steps=50, batch_size=8, lr=0.01)
    parser.add_argument("--model", choices=BLOCKS, default="resnet26", help="default: %(default)s")
    parser.add_argument("--image-size", type=int, default=64, help="pixels (default: %(default)s)")
    parser.add_argument(
        "--warmup-steps", type=int, default=5, help="steps before timing (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    return harness.parse(parser)


def main() -> None:
    args = parse()
    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    torch.set_num_threads(harness.threads(hvd.local_size()))
    torch.manual_seed(args.seed)
    device = torch.device(args.device, hvd.local_rank() if args.device == "cuda" else 0)

    model = resnet(BLOCKS[args.model]).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch_harness.optimizer(args, model),
        named_parameters=model.named_parameters(),
        compression=torch_harness.compression(args),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()  # waits for a GPU

    for _ in range(args.warmup_steps):
        step()
    seconds = seconds_per_step(step, iterations=max(1, args.steps // STEPS_PER_ITERATION))

    result = torch_harness.describe(args, model, optimizer)
    result["seconds_per_step"] = round(statistics.median(seconds), 6)
    result["history"] = {"seconds_per_step": [round(each, 6) for each in seconds]}
    if hvd.rank() == 0:
        harness.write_json(args.json, result)
        print(summary([args.batch_size / each for each in seconds], result), flush=True)


if __name__ == "__main__":
    main()
