"""Residuals in elastic jobs, where ranks join, leave and fail.

Users use the states of `horovod_topk.torch.elastic` and `horovod_topk.tensorflow.elastic`
(Horovod's `hvd.elastic.TorchState(..., compression=topk)` works too).

Each rank commits and restores its own residuals. When the ranks of a job change, they communicate
once (`manager.Manager.reconcile`), so that the sum of what is still to be applied stays the same
(`core.state.reshard`):

- a rank that stays multiplies its residual by P_new / P_old with op=Average, and by 1 with op=Sum;
- a rank that joins starts with a residual of zero, and gets the count of committed steps, which is
  the key of random numbers, and the method's state that is equal on all ranks, such as PowerSGD's
  Q;
- before a rank leaves after a warning, all ranks average their residuals;
- the committed residual of a rank that failed is taken over by another rank, if `commit_dir` names
  a folder that all ranks can read. Otherwise it is lost: see `Stats.lost_ranks`, `Stats.lost_norm`.

Source: the mean's mass as in Karimireddy et al. 2019, whose sum over ranks is what a step applies.
"""

from horovod_topk.elastic.manager import Manager, Talk, free_name

__all__ = ["Manager", "Talk", "free_name"]
