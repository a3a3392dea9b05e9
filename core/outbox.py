"""Outbox: the outputs for each frontend, collected over one turn and sent as one message.

Columns of a step may mix frontends; they are split by frontend_id here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..ipc.messages.base import BulkArray
from ..ipc.messages.core import EngineCoreOutputs, Finished, LogprobColumns, Pooled, Started
from .logprob_table import LogprobTable
from .result_processor import NewTokens


@dataclass
class _Draft:
    keys: bytes = b""
    counts: bytes = b""
    starts: bytes = b""
    token_ids: bytes = b""
    accepted: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: list[LogprobColumns] = field(default_factory=list)
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)

    def add(self, keys: bytes, counts: bytes, starts: bytes, token_ids: bytes) -> None:
        """Append columns of tokens."""
        self.keys += keys
        self.counts += counts
        self.starts += starts
        self.token_ids += token_ids


class Outbox:
    """Owns a draft by frontend; `take` empties it."""

    def __init__(self) -> None:
        self._draft_by_frontend: dict[int, _Draft] = {}
        self._is_due = False  # a draft has more than jump-forward tokens

    def _draft(self, frontend_id: int) -> _Draft:
        self._is_due = True
        return self._draft_by_frontend.setdefault(frontend_id, _Draft())

    def accept(self, frontend_id: int, key: int) -> None:
        self._draft(frontend_id).accepted.append(key)

    def start(self, frontend_id: int, started: Started) -> None:
        self._draft(frontend_id).started.append(started)

    def finish(self, frontend_id: int, finished: Finished, vector: BulkArray | None = None) -> None:
        draft = self._draft(frontend_id)
        draft.finished.append(finished)
        if vector is not None:
            draft.pooled.append(Pooled(owner=finished.key, vector=vector))

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
                self._draft(frontend_id).logprobs.append(table.to_columns())
        if tokens.prompt_logprobs is not None:
            for frontend_id, table in _by_frontend(tokens.prompt_logprobs):
                self._draft(frontend_id).prompt_logprobs.append(table.to_columns())
        of = tokens.token_owners
        frames = of.keys, of.counts, tokens.starts, tokens.token_ids
        if of.frontend_id is not None:
            self._draft(of.frontend_id).add(*frames)
            return
        for frontend_id in np.unique(of.frontend_ids).tolist():
            mine = of.frontend_ids == frontend_id
            self._draft(frontend_id).add(*(np.frombuffer(frame, np.int32)[mine].tobytes() for frame in frames))

    def drop(self, frontend_id: int) -> None:
        """Drop the draft of a frontend that has gone."""
        self._draft_by_frontend.pop(frontend_id, None)

    def take(self) -> list[tuple[int, EngineCoreOutputs]]:
        """Return one message for each frontend with outputs."""
        if not self._is_due:
            return []
        self._is_due = False
        drafts, self._draft_by_frontend = self._draft_by_frontend, {}
        return [(frontend_id, _message(draft)) for frontend_id, draft in drafts.items()]


def _by_frontend(table: LogprobTable) -> Iterator[tuple[int, LogprobTable]]:
    for frontend_id in np.unique(table.frontend_ids).tolist():
        yield frontend_id, table.select(table.frontend_ids == frontend_id)


def _message(draft: _Draft) -> EngineCoreOutputs:
    logprobs, prompt_logprobs = (LogprobColumns.join(parts) for parts in (draft.logprobs, draft.prompt_logprobs))
    return EngineCoreOutputs(**vars(draft) | {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs})
