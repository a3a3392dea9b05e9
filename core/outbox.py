"""Outbox: the outputs for each frontend, collected over one turn and sent as one message.

The tokens of a step may belong to several frontends; they are split by frontend_id here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..ipc.messages.core import EngineCoreOutputs, KeyLogprobs
from .scheduling.result_processor import NewTokens


class Outbox:
    """Owner of one message for each frontend. `take` returns and removes them, unless all hold only jump-forward
    tokens."""

    def __init__(self) -> None:
        self._outputs_by_frontend: dict[int, EngineCoreOutputs] = {}
        self._is_due = False  # a message has more than jump-forward tokens

    def of(self, frontend_id: int) -> EngineCoreOutputs:
        """Return the frontend's message of this turn, to which the caller adds; the next `take` returns it."""
        self._is_due = True
        outputs = self._outputs_by_frontend.get(frontend_id)
        if outputs is None:
            outputs = self._outputs_by_frontend[frontend_id] = EngineCoreOutputs()
        return outputs

    def add_tokens(self, tokens: NewTokens, *, are_jump_tokens: bool = False) -> None:
        """Add tokens and logprobs to the messages of their frontends. Jump-forward tokens alone do not make `take`
        return the messages; the tokens of a step do, even if there are none."""
        is_due = self._is_due or not are_jump_tokens
        for frontend_id, columns in tokens.logprobs:
            outputs = self.of(frontend_id)
            outputs.logprobs = KeyLogprobs.join([outputs.logprobs, columns])
        for frontend_id, columns in tokens.prompt_logprobs:
            outputs = self.of(frontend_id)
            outputs.prompt_logprobs = KeyLogprobs.join([outputs.prompt_logprobs, columns])
        of = tokens.token_owners
        if of.frontend_id is not None:
            outputs = self.of(of.frontend_id)
            _add_columns(outputs, of.keys, starts=tokens.starts, counts=of.counts, token_ids=tokens.token_ids)
        else:
            for frontend_id in np.unique(of.frontend_ids).tolist():
                is_mine = of.frontend_ids == frontend_id
                _add_columns(
                    self.of(frontend_id),
                    _select(of.keys, is_mine),
                    starts=_select(tokens.starts, is_mine),
                    counts=_select(of.counts, is_mine),
                    token_ids=_select(tokens.token_ids, is_mine),
                )
        self._is_due = is_due

    def drop(self, frontend_id: int) -> None:
        """Drop the message of a lost frontend."""
        self._outputs_by_frontend.pop(frontend_id, None)

    def take(self) -> list[tuple[int, EngineCoreOutputs]]:
        """Remove and return one message for each frontend with outputs; none while all hold only jump tokens."""
        if not self._is_due:
            return []
        self._is_due = False
        outputs_by_frontend, self._outputs_by_frontend = self._outputs_by_frontend, {}
        return list(outputs_by_frontend.items())


def _select(frame: bytes, is_mine: npt.NDArray[np.bool_]) -> bytes:
    """Return the values of a column (int32) at the positions that `is_mine` marks."""
    return np.frombuffer(frame, np.int32)[is_mine].tobytes()


def _add_columns(outputs: EngineCoreOutputs, keys: bytes, *, starts: bytes, counts: bytes, token_ids: bytes) -> None:
    outputs.keys += keys
    outputs.starts += starts
    outputs.counts += counts
    outputs.token_ids += token_ids
