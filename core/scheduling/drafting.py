"""Drafting: adds drafts, guesses of a row's next tokens, to the step that computes its last known token.

A Proposer chooses them. A wrong draft costs time; it changes no answer, except by rounding where the kernels compute
rows with drafts differently (Initialize.has_exact_drafts is False). Drafts get only what a step has left: the budget
after all prompts, and blocks that are not reserved for a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from ...ipc.messages.supervisor import DraftSource, SpeculationProgress
from ...ipc.spec.config.speculation import MAX_DRAFTS
from ..request import Ids, Request
from .step.rows import Rows
from .step.table_growth import TableGrowth
from .step_feature import StepFeature


class Draft(NamedTuple):
    """Guesses of the next tokens of a row, and the name of their source."""

    source: str
    token_ids: list[int]


class Proposer(Protocol):
    """Interface of the object that guesses the next tokens of rows."""

    @property
    def num_expected(self) -> float:
        """Expected number of accepted drafts, among all drafts that were proposed so far."""
        ...

    @property
    def num_corpus_tokens(self) -> int:
        """Number of tokens of finished answers that are kept to find drafts in."""
        ...

    @property
    def may_propose(self) -> bool:
        """Whether to call `holds_next_step` and `propose` for the next step."""
        ...

    def holds_next_step(self, rows: Rows) -> bool:
        """Return whether to wait for the result of the step in flight before the next step is sent. Only then are the
        last tokens of its rows known, so that drafts can follow them."""
        ...

    def propose(self, rows: Rows, limits: Ids) -> Mapping[int, Draft]:
        """Return drafts by row, none empty. limits: [max_num_seqs] largest number of drafts of each row."""
        ...


class Drafting(StepFeature):
    """Feature that adds drafts to a step; without a `proposer` it adds none."""

    def __init__(self, rows: Rows, growth: TableGrowth) -> None:
        self._rows, self._growth = rows, growth
        self.proposer: Proposer | None = None
        self._source_by_row: dict[int, str] = {}  # source of the drafts in flight, by row
        self.num_drafted: Counter[str] = Counter()  # drafts that were verified, by source
        self.num_accepted: Counter[tuple[str, int]] = Counter()  # right drafts, by source and position
        self.num_steps_by_drafts: Counter[int] = Counter()  # results of a row with drafts, by their number

    def delays_step(self) -> bool:
        return self.proposer is not None and self.proposer.may_propose and self.proposer.holds_next_step(self._rows)

    def propose(self) -> Mapping[int, Draft]:
        """Return drafts by row for the next step."""
        if self.proposer is None or not self.proposer.may_propose:
            return {}
        limits = np.minimum(self._rows.draftable(), MAX_DRAFTS)
        return self.proposer.propose(self._rows, limits) if limits.any() else {}

    def place(self, drafts: Mapping[int, Draft], counts: Ids, budget: int) -> dict[int, list[int]]:
        """Add drafts to rows that compute their last known token, as far as budget and blocks last; return those that
        fit, by row. They preempt no request: a block stays free for each row. counts: [max_num_seqs] tokens of the step
        by row."""
        placed = dict[int, list[int]]()
        rows, limits = self._rows, self._rows.draftable()
        budget -= int(counts.sum())
        for row, (source, token_ids) in drafts.items():
            request = rows.request_by_row[row]
            num_left = int(rows.num_tokens[row] - rows.num_scheduled[row])
            if request is None or counts[row] != num_left:
                continue
            if request.begin_ids:  # masks apply to the tokens after one, and a step with drafts has none yet
                token_ids = _before(token_ids, request.begin_ids)
            num_tokens = int(rows.num_tokens[row])
            count = min(len(token_ids), MAX_DRAFTS, int(limits[row]), budget)
            count = min(count, self._growth.room(request, num_tokens + count) - num_tokens)
            if count > 0:
                has_room = self._growth.grow_for_drafts(request, num_tokens + count)
                assert has_room, "there was room"
                placed[row] = token_ids[:count]
                counts[row] += count
                rows.num_drafts[row] = count
                if rows.have_states:
                    rows.num_withheld[row] = counts[row]
                self._source_by_row[row] = source
                budget -= count
        return placed

    def grow_ahead(self, request: Request, num_tokens: int) -> None:
        """Extend the tables of a running request so that the draft model can write up to `num_tokens` tokens, as far as
        blocks are free that are not reserved for a row."""
        self._growth.grow_ahead(request, num_tokens)

    def on_verified(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a row whose result has come, and how many of them were accepted."""
        source, request = self._source_by_row[row], self._rows.request(row)
        request.num_drafts += num_drafts
        request.num_accepted_drafts += num_accepted
        self.num_drafted[source] += num_drafts
        self.num_accepted.update((source, position) for position in range(num_accepted))
        self.num_steps_by_drafts[num_drafts] += 1

    def report(self) -> dict[str, SpeculationProgress]:
        if self.proposer is None:
            return {}
        sources = []
        for name, num_drafted in self.num_drafted.items():
            accepted = [self.num_accepted[name, position] for position in range(MAX_DRAFTS)]
            sources.append(DraftSource(name=name, num_drafted=num_drafted, num_accepted_by_position=accepted))
        return {
            "speculation": SpeculationProgress(
                sources=sources,
                num_steps_by_drafts=dict(self.num_steps_by_drafts),
                num_expected=self.proposer.num_expected,
                num_corpus_tokens=self.proposer.num_corpus_tokens,
            )
        }


def _before(token_ids: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens before the first that is one of `ends`."""
    return list(takewhile(lambda token_id: token_id not in ends, token_ids))
