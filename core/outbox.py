"""What the core has to tell each frontend, gathered over one turn and sent as one message.

Columns come in as arrays that may mix frontends; here they are parted by owner.
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
        """More columns of tokens."""
        self.keys += keys
        self.counts += counts
        self.starts += starts
        self.token_ids += token_ids


class Outbox:
    """Drafts by owner; `take` empties it."""

    def __init__(self) -> None:
        self._draft_by_owner: dict[int, _Draft] = {}
        self._is_due = False  # there is more than tokens that may wait

    def _draft(self, owner: int) -> _Draft:
        self._is_due = True
        return self._draft_by_owner.setdefault(owner, _Draft())

    def accept(self, owner: int, key: int) -> None:
        self._draft(owner).accepted.append(key)

    def start(self, owner: int, started: Started) -> None:
        self._draft(owner).started.append(started)

    def finish(self, owner: int, finished: Finished, vector: BulkArray | None = None) -> None:
        draft = self._draft(owner)
        draft.finished.append(finished)
        if vector is not None:
            draft.pooled.append(Pooled(owner=finished.key, vector=vector))

    def add_jump_tokens(self, tokens: NewTokens) -> None:
        """Tokens ahead of the step that samples the first of them wait for what that step, or anything, has to tell."""
        was_due = self._is_due
        self.add_tokens(tokens)
        self._is_due = was_due

    def add_tokens(self, tokens: NewTokens) -> None:
        """What a step has brought, if only a sign that it is over."""
        self._is_due = True
        if tokens.logprobs is not None:
            for owner, table in _by_owner(tokens.logprobs):
                self._draft(owner).logprobs.append(table.to_columns())
        if tokens.prompt_logprobs is not None:
            for owner, table in _by_owner(tokens.prompt_logprobs):
                self._draft(owner).prompt_logprobs.append(table.to_columns())
        of = tokens.owners
        frames = of.keys, of.counts, tokens.starts, tokens.token_ids
        if of.owner is not None:
            self._draft(of.owner).add(*frames)
            return
        for owner in np.unique(of.owners).tolist():
            mine = of.owners == owner
            self._draft(owner).add(*(np.frombuffer(frame, np.int32)[mine].tobytes() for frame in frames))

    def drop(self, owner: int) -> None:
        """The frontend is gone."""
        self._draft_by_owner.pop(owner, None)

    def take(self) -> list[tuple[int, EngineCoreOutputs]]:
        """One message per frontend that has news."""
        if not self._is_due:
            return []
        self._is_due = False
        drafts, self._draft_by_owner = self._draft_by_owner, {}
        return [(owner, _message(draft)) for owner, draft in drafts.items()]


def _by_owner(table: LogprobTable) -> Iterator[tuple[int, LogprobTable]]:
    for owner in np.unique(table.owners).tolist():
        yield owner, table.select(table.owners == owner)


def _message(draft: _Draft) -> EngineCoreOutputs:
    logprobs, prompt_logprobs = (LogprobColumns.join(parts) for parts in (draft.logprobs, draft.prompt_logprobs))
    return EngineCoreOutputs(**vars(draft) | {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs})
