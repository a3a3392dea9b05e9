"""StepLedger: the steps in flight. Entries are immutable; results come in order."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ....ipc.errors import ProtocolError
from ....ipc.messages.media import Encode
from ...kv.offload.step_copies import StepCopies
from .batch import Batch


class LedgerEntry(NamedTuple):
    """One step in flight. If a row's epoch is not that in `batch`, the row has another request: its result is void."""

    step: int
    batch: Batch
    number: int  # of the step within its batch, from 0
    pending_blocks: list[tuple[int, bytes]]  # blocks and keys that are written when this step is done
    copies: StepCopies | None
    encodes: list[Encode]


class StepLedger:
    """A FIFO of entries; a result for any step but the oldest is a ProtocolError."""

    def __init__(self) -> None:
        self.entries: deque[LedgerEntry] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def oldest(self) -> LedgerEntry | None:
        return self.entries[0] if self.entries else None

    def add(
        self,
        step: int,
        batch: Batch,
        pending_blocks: list[tuple[int, bytes]],
        copies: StepCopies | None,
        encodes: list[Encode],
    ) -> None:
        """Enter the next step of `batch`, before it is sent, and count it in `batch.num_sent`."""
        self.entries.append(LedgerEntry(step, batch, batch.num_sent, pending_blocks, copies, encodes))
        batch.num_sent += 1

    def pop(self, step: int) -> LedgerEntry:
        """Remove and return the oldest entry; ProtocolError unless it is that of `step`."""
        if not self.entries or self.entries[0].step != step:
            expected = self.entries[0].step if self.entries else "none"
            raise ProtocolError(f"a result for step {step} came, the oldest in flight is {expected}")
        return self.entries.popleft()
