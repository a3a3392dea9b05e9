"""LogprobTable: the logprobs of a step, converted from the rows of workers to the request keys of frontends.

Input and output are columns; the values of the logprobs are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...ipc.errors import ProtocolError
from ...ipc.messages.core import KeyLogprobs
from ...ipc.messages.workers import RowLogprobs
from ..request import Ids

KeyLogprobsByFrontend: TypeAlias = Sequence[tuple[int, KeyLogprobs]]


class LogprobTable(NamedTuple):
    """Logprobs of n tokens; token i has `widths[i]` entries in the two flat columns."""

    rows: Ids  # [n]
    positions: Ids  # [n]
    widths: Ids  # [n]
    ranks: Ids  # [n]
    token_ids: Ids  # [sum of widths]
    logprobs: npt.NDArray[np.float32]  # likewise

    @classmethod
    def of(cls, columns: RowLogprobs) -> LogprobTable:
        """Decode a worker's columns. ProtocolError if their lengths do not agree."""
        rows, positions, widths, ranks, token_ids = (
            np.frombuffer(frame, np.int32)
            for frame in (columns.rows, columns.positions, columns.widths, columns.ranks, columns.token_ids)
        )
        logprobs = np.frombuffer(columns.logprobs, np.float32)
        if not len(rows) == len(positions) == len(widths) == len(ranks) or len(token_ids) != len(logprobs):
            raise ProtocolError(f"logprobs of {len(rows)} rows have {len(ranks)} ranks and {len(widths)} widths")
        if (widths < 1).any() or int(widths.sum()) != len(token_ids):
            raise ProtocolError(f"logprobs have {len(token_ids)} entries, their widths sum to {int(widths.sum())}")
        return cls(rows, positions, widths, ranks, token_ids, logprobs)

    def select(self, mask: npt.NDArray[np.bool_]) -> LogprobTable:
        """Return the table of the tokens that `mask` ([n]) selects."""
        if mask.all():
            return self
        entries = np.repeat(mask, self.widths)
        return LogprobTable._make([*(column[mask] for column in self[:4]), *(column[entries] for column in self[4:])])

    def by_frontend(self, frontend_ids: Ids, keys: Ids, positions: Ids) -> KeyLogprobsByFrontend:
        """Return for each frontend its id and the encoded logprobs of its tokens, under the given request keys and
        positions. Inputs: [n]."""
        found = []
        for frontend_id in np.unique(frontend_ids).tolist():
            mask = frontend_ids == frontend_id
            columns = self.select(mask)
            encoded = KeyLogprobs(
                keys=keys[mask].tobytes(),
                positions=positions[mask].tobytes(),
                widths=columns.widths.tobytes(),
                ranks=columns.ranks.tobytes(),
                token_ids=columns.token_ids.tobytes(),
                logprobs=columns.logprobs.tobytes(),
            )
            found.append((frontend_id, encoded))
        return found
