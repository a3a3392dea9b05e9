"""Opening: whether the namespace of the weights is known, and the orders that clear the tiers.

Until the tier process has sent the namespace of the weights, and after its loss, no block is loaded or written, so that
no block is found under keys of other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from ....ipc.messages.tier import ClearTier, CoreToTier, OpenTier, TierOpened


class Opening:
    """State of the tier process as the core knows it. `is_open`: it has sent the namespace of the present weights."""

    def __init__(self, facts: bytes, send: Callable[[CoreToTier], None]) -> None:
        self._facts, self._send = facts, send
        self.is_open = self.has_process = False
        self._num_opens = 0
        self._clears: dict[int, Callable[[], None]] = {}
        self._serials = count(1)

    def ask(self, model_folder: str) -> None:
        """Ask a tier process for the namespace of the weights in `model_folder`."""
        self.has_process = True
        self._num_opens += 1
        self._send(OpenTier(serial=self._num_opens, model_folder=model_folder, facts=self._facts))

    def take(self, message: TierOpened) -> bool:
        """Open the tiers and return True if this answers the last `ask`."""
        is_last = message.serial == self._num_opens and self.has_process
        self.is_open |= is_last
        return is_last

    def close(self) -> None:
        """Close the tiers until the next `ask` is answered: the weights are about to change."""
        self.is_open = False

    def clear(self, done: Callable[[], None]) -> None:
        """Remove all blocks from disk and remote store, then call `done`. If the tiers are closed, remove nothing and
        call `done` at once."""
        if not self.is_open:
            done()
            return
        serial = next(self._serials)
        self._clears[serial] = done
        self._send(ClearTier(serial=serial))

    def on_cleared(self, serial: int) -> None:
        if (done := self._clears.pop(serial, None)) is not None:
            done()

    def on_lost(self) -> None:
        """Record that the tier process has ended: its orders to clear count as done."""
        self.is_open = self.has_process = False
        clears, self._clears = self._clears, {}
        for done in clears.values():
            done()
