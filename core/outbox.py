"""Outbox: the outputs for each frontend, collected over one turn and sent as one message.

Columns of a step may mix frontends; they are split by frontend_id here.
"""

from __future__ import annotations

import numpy as np

from ..ipc.messages.core import EngineCoreOutputs, KeyLogprobs
from .scheduling.result_processor import NewTokens


class Outbox:
    """Owns a message for each frontend. `take` empties it, unless all messages hold jump-forward tokens alone."""

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
        return these; the tokens of a step do, even if there are none."""
        is_due = self._is_due or not are_jump_tokens
        for frontend_id, columns in tokens.logprobs:
            outputs = self.of(frontend_id)
            outputs.logprobs = KeyLogprobs.join([outputs.logprobs, columns])
        for frontend_id, columns in tokens.prompt_logprobs:
            outputs = self.of(frontend_id)
            outputs.prompt_logprobs = KeyLogprobs.join([outputs.prompt_logprobs, columns])
        of = tokens.token_owners
        frames = of.keys, tokens.starts, of.counts, tokens.token_ids
        if of.frontend_id is not None:
            _add_columns(self.of(of.frontend_id), *frames)
        else:
            for frontend_id in np.unique(of.frontend_ids).tolist():
                mine = of.frontend_ids == frontend_id
                parts = (np.frombuffer(frame, np.int32)[mine].tobytes() for frame in frames)
                _add_columns(self.of(frontend_id), *parts)
        self._is_due = is_due

    def drop(self, frontend_id: int) -> None:
        """Drop the message of a frontend that has gone."""
        self._outputs_by_frontend.pop(frontend_id, None)

    def take(self) -> list[tuple[int, EngineCoreOutputs]]:
        """Return one message for each frontend with outputs; none as long as all hold jump-forward tokens alone."""
        if not self._is_due:
            return []
        self._is_due = False
        outputs_by_frontend, self._outputs_by_frontend = self._outputs_by_frontend, {}
        return list(outputs_by_frontend.items())


def _add_columns(outputs: EngineCoreOutputs, keys: bytes, starts: bytes, counts: bytes, token_ids: bytes) -> None:
    outputs.keys += keys
    outputs.starts += starts
    outputs.counts += counts
    outputs.token_ids += token_ids
