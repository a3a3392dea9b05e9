"""Outbox: the outputs for each frontend, collected over one turn and sent as one message.

Columns of a step may mix frontends; they are split by frontend_id here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..ipc.messages.base import BulkArray
from ..ipc.messages.core import EngineCoreOutputs, Finished, LogprobColumns, Pooled, Started
from .logprob_table import LogprobTable
from .result_processor import NewTokens


class Outbox:
    """Owns a message by frontend; `take` empties it."""

    def __init__(self) -> None:
        self._outputs_by_frontend: dict[int, EngineCoreOutputs] = {}
        self._is_due = False  # a message has more than jump-forward tokens

    def _of(self, frontend_id: int) -> EngineCoreOutputs:
        """Return the message of this turn, which is to be sent."""
        self._is_due = True
        outputs = self._outputs_by_frontend.get(frontend_id)
        if outputs is None:
            outputs = self._outputs_by_frontend[frontend_id] = EngineCoreOutputs()
        return outputs

    def accept(self, frontend_id: int, key: int) -> None:
        self._of(frontend_id).accepted.append(key)

    def start(self, frontend_id: int, started: Started) -> None:
        self._of(frontend_id).started.append(started)

    def finish(self, frontend_id: int, finished: Finished, vector: BulkArray | None = None) -> None:
        outputs = self._of(frontend_id)
        outputs.finished.append(finished)
        if vector is not None:
            outputs.pooled.append(Pooled(owner=finished.key, vector=vector))

    def add_jump_tokens(self, tokens: NewTokens) -> None:
        """Queue jump-forward tokens without triggering a send; they leave with the next message."""
        was_due = self._is_due
        self.add_tokens(tokens)
        self._is_due = was_due

    def add_tokens(self, tokens: NewTokens) -> None:
        """Queue the tokens and logprobs of a step, and send even if there are none."""
        self._is_due = True
        if tokens.logprobs is not None:
            for frontend_id, table in _by_frontend(tokens.logprobs):
                outputs = self._of(frontend_id)
                outputs.logprobs = LogprobColumns.join([outputs.logprobs, table.to_columns()])
        if tokens.prompt_logprobs is not None:
            for frontend_id, table in _by_frontend(tokens.prompt_logprobs):
                outputs = self._of(frontend_id)
                outputs.prompt_logprobs = LogprobColumns.join([outputs.prompt_logprobs, table.to_columns()])
        of = tokens.token_owners
        frames = of.keys, tokens.starts, of.counts, tokens.token_ids
        if of.frontend_id is not None:
            _add_columns(self._of(of.frontend_id), *frames)
            return
        for frontend_id in np.unique(of.frontend_ids).tolist():
            mine = of.frontend_ids == frontend_id
            _add_columns(self._of(frontend_id), *(np.frombuffer(frame, np.int32)[mine].tobytes() for frame in frames))

    def drop(self, frontend_id: int) -> None:
        """Drop the message of a frontend that has gone."""
        self._outputs_by_frontend.pop(frontend_id, None)

    def take(self) -> list[tuple[int, EngineCoreOutputs]]:
        """Return one message for each frontend with outputs."""
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


def _by_frontend(table: LogprobTable) -> Iterator[tuple[int, LogprobTable]]:
    for frontend_id in np.unique(table.frontend_ids).tolist():
        yield frontend_id, table.select(table.frontend_ids == frontend_id)
