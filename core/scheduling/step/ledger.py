"""StepLedger: the steps in flight, in the order in which they were sent and their results arrive."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ....ipc.errors import ProtocolError
from ....ipc.messages.media import Encode
from ...kv.slabs import Pending
from .batch import Batch
from .step_copies import StepCopies
from .step_delta import StepDelta


class LedgerEntry(NamedTuple):
    """One step in flight. If the epoch of a row differs from the one in `batch`, the row has another request by now,
    and the step's result for it is void."""

    step: int
    batch: Batch
    number: int  # number of the step within its batch, from 0
    pending_blocks: Pending  # blocks that are full once this step is done
    copies: StepCopies | None
    encodes: list[Encode]


class StepLedger:
    """First-in, first-out queue of the steps in flight."""

    def __init__(self) -> None:
        self.entries: deque[LedgerEntry] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def oldest(self) -> LedgerEntry | None:
        return self.entries[0] if self.entries else None

    def add(self, step: int, batch: Batch, pending_blocks: Pending, delta: StepDelta) -> None:
        """Add the next step of `batch`, before it is sent with `delta`, and count it in `batch.num_sent`."""
        self.entries.append(LedgerEntry(step, batch, batch.num_sent, pending_blocks, delta.copies, delta.encodes))
        batch.num_sent += 1

    def oldest_of(self, step: int) -> LedgerEntry:
        """Return the oldest entry. ProtocolError unless it is the entry of `step`."""
        if not self.entries or self.entries[0].step != step:
            expected = self.entries[0].step if self.entries else "none"
            raise ProtocolError(f"a result for step {step} came, the oldest in flight is {expected}")
        return self.entries[0]
