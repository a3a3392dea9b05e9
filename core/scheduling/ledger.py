"""The steps in flight: what was sent and not yet answered. Entries are immutable; results come in order."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...ipc.errors import ProtocolError
from .batch import Batch


class LedgerEntry(NamedTuple):
    """One step. The epochs in `batch` tell which rows changed hands since: their results are void."""

    step: int
    batch: Batch
    number: int  # which of the batch's steps it is; the first is 0
    pending_blocks: list[tuple[int, bytes]]  # blocks and keys that hold for certain when this step is done


class StepLedger:
    """A FIFO of entries; a result for any step but the oldest is a fault of the protocol."""

    def __init__(self) -> None:
        self._entries: deque[LedgerEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest(self) -> LedgerEntry | None:
        return self._entries[0] if self._entries else None

    def add(self, step: int, batch: Batch, published: list[tuple[int, bytes]]) -> None:
        """Enter the next step of `batch`, which is about to be sent."""
        self._entries.append(LedgerEntry(step, batch, batch.num_sent, published))
        batch.num_sent += 1

    def pop(self, step: int) -> LedgerEntry:
        """The entry that a result for `step` answers, taken off the ledger."""
        if not self._entries or self._entries[0].step != step:
            expected = self._entries[0].step if self._entries else "none"
            raise ProtocolError(f"a result for step {step} came, the oldest in flight is {expected}")
        return self._entries.popleft()

    def clear(self) -> None:
        self._entries.clear()
