"""The steps in flight: what was sent and not yet answered. Entries are immutable; results come in order."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..ipc.errors import ProtocolError
from .request import Ids


@dataclass(frozen=True)
class LedgerEntry:
    """One step. `epochs` tell which rows changed hands since: their results are void."""

    step: int
    rows: Ids
    epochs: Ids
    ends: Ids  # num_scheduled of each row after this step
    samples: npt.NDArray[np.bool_]  # which rows' last known token is computed here, but for those to embed
    pools: npt.NDArray[np.bool_]  # which rows to embed are computed to their end here
    num_tokens: int  # computed by the step, all rows together
    num_prompt_tokens: int  # of them, in chunks of more than one token
    scores_prompts: bool  # whether it tells the logprobs of prompts
    grammar_ids: Ids  # of the rows that sample by a grammar: the step waits for their masks
    published: list[tuple[int, bytes]]  # blocks and keys that hold for certain when this step is done
    sent_at: float = field(default_factory=time.monotonic)

    @property
    def sampling_rows(self) -> Ids:
        rows: Ids = self.rows[self.samples]
        return rows


class StepLedger:
    """A FIFO of entries; a result for any step but the oldest is a fault of the protocol."""

    def __init__(self) -> None:
        self._entries: deque[LedgerEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest(self) -> LedgerEntry | None:
        return self._entries[0] if self._entries else None

    def add(self, entry: LedgerEntry) -> None:
        self._entries.append(entry)

    def settle(self, step: int) -> LedgerEntry:
        """The entry that a result for `step` answers, taken off the ledger."""
        if not self._entries or self._entries[0].step != step:
            expected = self._entries[0].step if self._entries else "none"
            raise ProtocolError(f"a result for step {step} came, the oldest in flight is {expected}")
        return self._entries.popleft()

    def clear(self) -> None:
        self._entries.clear()
