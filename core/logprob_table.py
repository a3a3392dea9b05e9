"""LogprobTable: logprobs of a step, from rows (workers) to request keys (frontends).

Columns in, columns out; probabilities pass unread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ipc.errors import ProtocolError
from ..ipc.messages.core import LogprobColumns
from .request import Ids


@dataclass(frozen=True)
class LogprobTable:
    """n tokens; token i has `widths[i]` entries in the two flat columns."""

    frontend_ids: Ids  # [n] frontend; rows until `label`
    keys: Ids  # [n] request key; rows until `label`
    positions: Ids  # [n]
    widths: Ids  # [n]
    ranks: Ids  # [n]
    token_ids: Ids  # [sum of widths]
    logprobs: npt.NDArray[np.float32]  # likewise

    @classmethod
    def of(cls, columns: LogprobColumns) -> LogprobTable:
        """Decode a worker's columns. ProtocolError if their lengths do not fit."""
        rows, positions, widths, ranks, token_ids = (
            np.frombuffer(frame, np.int32)
            for frame in (columns.owners, columns.positions, columns.widths, columns.ranks, columns.token_ids)
        )
        logprobs = np.frombuffer(columns.logprobs, np.float32)
        if not len(rows) == len(positions) == len(widths) == len(ranks) or len(token_ids) != len(logprobs):
            raise ProtocolError(f"logprobs of {len(rows)} rows have {len(ranks)} ranks and {len(widths)} widths")
        if (widths < 1).any() or int(widths.sum()) != len(token_ids):
            raise ProtocolError(f"logprobs have {len(token_ids)} entries, their widths sum to {int(widths.sum())}")
        return cls(rows, rows, positions, widths, ranks, token_ids, logprobs)

    @property
    def rows(self) -> Ids:
        """[n], before `label`"""
        return self.keys

    def select(self, mask: npt.NDArray[np.bool_]) -> LogprobTable:
        """Return the selected tokens. mask: [n]."""
        if mask.all():
            return self
        entries = np.repeat(mask, self.widths)
        return LogprobTable(
            self.frontend_ids[mask],
            self.keys[mask],
            self.positions[mask],
            self.widths[mask],
            self.ranks[mask],
            self.token_ids[entries],
            self.logprobs[entries],
        )

    def label(self, frontend_ids: Ids, keys: Ids, positions: Ids) -> LogprobTable:
        """Return the same tokens under frontend ids, request keys and output indices. Each [n]."""
        return LogprobTable(frontend_ids, keys, positions, self.widths, self.ranks, self.token_ids, self.logprobs)

    def to_columns(self) -> LogprobColumns:
        """Encode the columns for a frontend."""
        return LogprobColumns(
            owners=self.keys.tobytes(),
            positions=self.positions.tobytes(),
            widths=self.widths.tobytes(),
            ranks=self.ranks.tobytes(),
            token_ids=self.token_ids.tobytes(),
            logprobs=self.logprobs.tobytes(),
        )
