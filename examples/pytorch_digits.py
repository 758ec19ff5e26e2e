"""A small convolutional network on scikit-learn's handwritten digits (1,797 images of 8 x 8).

    horovodrun -np 2 --gloo python examples/pytorch_digits.py --compression topk

It is an ordinary Horovod training script with one more import and one more argument. In short:

    from horovod_topk.torch import TopKEF
    hvd.DistributedOptimizer(..., compression=TopKEF)

It reports accuracy on 450 held-out images. 300 more images are kept for choosing settings.
"""

from __future__ import annotations

import harness
import horovod.torch as hvd
import torch
import torch_harness
from ddp_digits import DigitsCNN, digits
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR


def main() -> None:
    parser = harness.arguments(__doc__, steps=600, batch_size=32, lr=0.05)
    harness.add_evaluation(parser, every=20)
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    torch.set_num_threads(harness.threads(hvd.local_size()))
    torch.manual_seed(args.seed)

    model = DigitsCNN()
    optimizer = hvd.DistributedOptimizer(
        torch_harness.optimizer(args, model),
        named_parameters=model.named_parameters(),
        compression=torch_harness.compression(args),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = LambdaLR(optimizer, harness.warmup_cosine(args.steps))

    def correct(images: Tensor, labels: Tensor) -> Tensor:
        return model(images).argmax(dim=1) == labels

    unseen = digits(args.evaluate_on)
    run = torch_harness.Run(args, model, optimizer)
    batches = torch_harness.batches(*digits("training"), batch_size=args.batch_size, seed=args.seed)
    for images, labels in run.steps(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.stepped(loss.item()):
            run.evaluated(accuracy=torch_harness.mean_over_rows(correct, *unseen))
    run.finish()


if __name__ == "__main__":
    main()
