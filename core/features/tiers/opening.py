"""Opening: whether the namespace of the weights is known, and the orders that clear the tiers.

Until the tier process has sent the namespace of the weights, and after its loss, no block is loaded from a source or
written to one, so that no block is found under keys of other weights. Copies between pool and slots go on all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from ....ipc.messages.tier import ClearTier, CoreToTier, OpenTier, TierOpened


class Opening:
    """State of the tier process as the core knows it. `is_open`: it has sent the namespace of the present weights.

    Closed tiers cannot be cleared, but this engine finds none of their blocks either. A clear that is ordered while
    they are closed is carried out before they open again.
    """

    def __init__(self, facts: bytes, send: Callable[[CoreToTier], None], on_open: Callable[[bytes], None]) -> None:
        """on_open: called with the namespace when the tiers open."""
        self._facts, self._send, self._on_open = facts, send, on_open
        self.is_open = self.has_process = False
        self._num_opens = 0
        self._must_clear = False  # before the tiers open
        self._clears: dict[int, Callable[[], None]] = {}
        self._serials = count(1)

    def ask(self, model_folder: str) -> None:
        """Ask a tier process for the namespace of the weights in `model_folder`."""
        self.has_process = True
        self._num_opens += 1
        self._send(OpenTier(serial=self._num_opens, model_folder=model_folder, facts=self._facts))

    def on_opened(self, message: TierOpened) -> None:
        """Open the tiers, after a clear that is due, if the message answers the last `ask`."""
        if message.serial != self._num_opens or not self.has_process:
            return
        if self._must_clear:
            self._must_clear = False
            self._order_clear(lambda: self.on_opened(message))
        else:
            self.is_open = True
            self._on_open(message.namespace)

    def close(self) -> None:
        """Close the tiers until the next `ask` is answered: the weights are about to change."""
        self.is_open = False

    def clear(self, done: Callable[[], None]) -> None:
        """Order the removal of all blocks of these weights from the disk and the remote store, and call `done` when it
        has ended. If the tiers are closed, call `done` at once: the blocks are removed before the tiers open."""
        if self.is_open:
            self._order_clear(done)
        else:
            self._must_clear = True
            done()

    def _order_clear(self, done: Callable[[], None]) -> None:
        serial = next(self._serials)
        self._clears[serial] = done
        self._send(ClearTier(serial=serial))

    def on_cleared(self, serial: int) -> None:
        if (done := self._clears.pop(serial, None)) is not None:
            done()

    def on_lost(self) -> None:
        """Record that the tier process has ended. Its orders to clear are answered, and carried out before the next
        process opens the tiers."""
        self.is_open = self.has_process = False
        self._must_clear |= bool(self._clears)
        clears, self._clears = self._clears, {}
        for done in clears.values():
            done()
