"""HeadStates: hidden states of the tokens that the model computed last, from which a head will guess.

    each step → states of its tokens → a ring → those of a row from some token on, when drafts of the row are wanted

Steps that want no drafts cost one copy of their states. A token's states are lost once the ring is full of later ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ....ipc.spec.drafts.head_config import HeadConfig
from ....kernels.contract import AuxStates
from ...machine.arrays import I32, I64
from ...step.step_inputs import StepInputs

STEPS_KEPT = 4  # of the largest size, which the ring has room for


class HeadStates:
    """Owner of the ring, and of the place in it of each row's tokens."""

    def __init__(
        self,
        config: HeadConfig,
        fuse: Callable[[Tensor], Tensor],
        num_kept: int,
        num_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """fuse: makes the state that the head reads of each token's kept states. num_kept: tokens that the ring holds,
        at least those of a step. max_tokens: of a row."""
        self._depths, self._size, self._fuse = config.depths, config.num_inputs, fuse
        self._ring = torch.empty((num_kept, self._size), dtype=dtype, device=device)
        self._next = 0
        # 0: none; else 1 + the place of a token's states. A page of zeros takes no memory before it is written.
        self._places: I32 = np.zeros((num_rows, max_tokens), np.int32)
        self._rows: I32 = np.zeros(num_kept, np.int32)  # by place: row and position of the token there
        self._positions: I64 = np.zeros(num_kept, np.int64)

    def prepare(self, inputs: StepInputs, *, is_asked: bool) -> StepInputs:
        """Return the step's inputs with room for the states that it keeps. Its tokens lose those that they had: of
        drafts at their places, which were wrong. is_asked: drafts are wanted, so that the step must keep states; others
        keep them unless they run as a graph."""
        self._places[_rows_of(inputs), inputs.positions] = 0
        if not self._depths:
            return inputs._replace(needs_states=is_asked)
        aux = AuxStates(self._depths, self._ring.new_empty((len(inputs.token_ids), self._size)))
        return inputs._replace(aux=aux, needs_states=is_asked)

    def keep(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Put the states of a step's tokens into the ring. hidden: those behind the final norm; [0, …] if the step ran
        as a graph, which keeps none."""
        count = len(inputs.token_ids)
        if len(hidden) < count:
            return
        states = hidden if inputs.aux is None else inputs.aux.out
        rows, positions = _rows_of(inputs), inputs.positions
        places = (self._next + np.arange(count)) % len(self._ring)
        old_rows, old_positions = self._rows[places], self._positions[places]
        is_lost = self._places[old_rows, old_positions] == places + 1
        self._places[old_rows[is_lost], old_positions[is_lost]] = 0
        self._places[rows, positions] = places + 1
        self._rows[places], self._positions[places] = rows, positions
        num_first = min(count, len(self._ring) - self._next)
        self._ring[self._next : self._next + num_first] = states[:num_first]
        self._ring[: count - num_first] = states[num_first:]
        self._next = (self._next + count) % len(self._ring)

    def forget(self, row: int) -> None:
        self._places[row] = 0

    def reach(self, row: int, end: int) -> int:
        """Return the first position of a row from which on all states before `end` are there."""
        missing = np.flatnonzero(self._places[row, :end] == 0)
        return int(missing[-1]) + 1 if len(missing) else 0

    def take(self, rows: I32, firsts: I64, counts: I32 | I64) -> Tensor:
        """Return the fused states [sum of counts, hidden_size] of `counts` tokens of each row, which must be there."""
        spans = zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        places = np.concatenate([self._places[row, first : first + count] for row, first, count in spans])
        return self._fuse(self._ring[torch.from_numpy(places.astype(np.int64) - 1).to(self._ring.device)])


def _rows_of(inputs: StepInputs) -> I32:
    """Return the row of each token of a step."""
    return np.repeat(inputs.rows, np.diff(inputs.query_starts))
