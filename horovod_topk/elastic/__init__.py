"""What ranks owe the model in an elastic job, where ranks are lost, leave and join.

Users meet it as `hvd.elastic.TorchState(..., compression=topk)`, or better as the states of
`horovod_topk.torch.elastic` and `horovod_topk.tensorflow.elastic`.

A commit, and the way back to it, are each rank's own affair. When a job goes on with other ranks,
they meet once (`manager.Manager.settle`) and keep the pending mass of `horovod_topk.core.reshard`:

- who was there before multiplies its residual by P_new / P_old (op=Average; op=Sum: by 1);
- who joins owes nothing, and learns how far the schedule of ratios has come;
- who leaves after a warning has shared out what it owes among all;
- what a lost rank had committed is taken on by another one, if `commit_dir` keeps it on a disk that
  all ranks can read. Otherwise it is gone, and `Stats.lost_ranks` and `Stats.lost_norm` say so.

Source: the mean's mass as in Karimireddy et al. 2019, whose sum over ranks is what a step applies.
"""

from horovod_topk.elastic.manager import Manager, Talk, free_name

__all__ = ["Manager", "Talk", "free_name"]
