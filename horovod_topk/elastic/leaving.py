"""Averages residuals before ranks leave an elastic job, in any framework."""

from __future__ import annotations

from collections.abc import Iterable

from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt

from horovod_topk.elastic.manager import Manager


class HandsOver(State):  # type: ignore[misc]  # Horovod has no annotations
    """A mixin of elastic states that averages residuals before ranks leave.

    List it before the state class in the bases.
    """

    def _managers(self) -> Iterable[Manager]:
        """The managers of the state's compressors, in the same order on all ranks."""
        return ()

    def check_host_updates(self) -> None:
        """As Horovod's; before its interrupt, which all ranks get, average residuals."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            for manager in self._managers():
                manager.hand_over()
            raise HostsUpdatedInterrupt(skip_sync=False) from None
