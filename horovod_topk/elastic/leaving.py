"""What every framework's elastic state does before ranks leave."""

from __future__ import annotations

from collections.abc import Iterable

from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt

from horovod_topk.elastic.manager import Manager


class HandsOver(State):  # type: ignore[misc]  # Horovod has no annotations
    """A state of Horovod's whose ranks average their residuals while all of them are still there.

    To be named before the state it is mixed into.
    """

    def _managers(self) -> Iterable[Manager]:
        """Of the compressors that the state was given, in the same order on all ranks."""
        return ()

    def check_host_updates(self) -> None:
        """As Horovod's; on its interrupt, which all ranks get at once, residuals are handed over.

        Raises:
            HostsUpdatedInterrupt: hosts have been added or removed.
        """
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            for manager in self._managers():
                manager.hand_over()
            raise HostsUpdatedInterrupt(skip_sync=False) from None
