"""ModelDrafts: asks workers for drafts of the draft model, where that pays, and keeps them until the next step.

    plan: draft limits of a step → its result brings drafts → a match for each row → the proposer compares and sends

The step after one that asks waits for its result, and the draft model takes time, too. Whether to ask is thus decided
by measured rates: the tokens per second of steps that ask, and of others. Both are tried from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ....ipc.errors import ProtocolError
from ....ipc.messages.workers import DraftWork, ModelRunnerOutput
from ....ipc.spec.config.speculation import MAX_DRAFTS
from ...request import Ids, Request
from ...scheduling.result_processor import NewTokens
from ...scheduling.scheduler import Scheduler
from ...scheduling.step.ledger import LedgerEntry
from ...scheduling.step_feature import StepFeature, StepPlan
from .ask_rates import AskRates
from .choice import DraftChoice
from .own_index import Match

SOURCE = "model"


class _Made(NamedTuple):
    """The drafts of a row."""

    request: Request
    start: int  # position of the first
    match: Match


class ModelDrafts(StepFeature):
    """Feature that owns the drafts that the workers made last, and the rates of steps with and without them."""

    def __init__(self, scheduler: Scheduler, choice: DraftChoice, most: int) -> None:
        """choice: it owns the costs of steps. most: drafts of a row in a step."""
        self.clock: Callable[[], float] = time.monotonic
        self._scheduler, self._choice = scheduler, choice
        self._most = min(most, MAX_DRAFTS)
        self.rates = AskRates()
        self._made_by_row: dict[int, _Made] = {}
        self._asked: dict[int, Request] = {}  # by row: requests of the step in flight that asks
        self._last_result_at, self._was_asked, self._was_busy = 0.0, False, False

    def match(self, row: int, request: Request, end: int) -> Match | None:
        """Return the drafts of the tokens from `end` on of the request in `row`; None if there are none."""
        made = self._made_by_row.get(row)
        return made.match if made is not None and made.request is request and made.start == end else None

    # ── StepFeature ──────────────────────────────────────────────────────────────────────────────────────────────

    def delays_step(self) -> bool:
        return bool(self._asked)

    def plan(self, step: StepPlan) -> None:
        """Ask for drafts of all rows that sample in this step, unless one of them computes a prompt."""
        rows = self._scheduler.rows
        if self._choice.is_learning or not rows.num_active:
            return
        computed = rows.num_scheduled + step.counts
        chosen = np.flatnonzero(step.counts > 0)
        known = computed[chosen] - rows.num_drafts[chosen]
        are_plain = (known >= rows.num_tokens[chosen]) & (rows.num_tokens[chosen] > rows.num_prompt_tokens[chosen])
        if not len(chosen) or not are_plain.all() or rows.is_pooled[chosen].any():
            return
        plain_s = self._choice.costs.plain_s(rows.num_active)
        if plain_s is None or not self.rates.should_ask(rows.num_active):
            return
        limits = np.minimum(rows.token_limit - 2 - computed, self._most)
        chosen = chosen[limits[chosen] > 0]
        for row in chosen.tolist():
            request, limit = rows.request(row), int(limits[row])
            self._scheduler.batches.drafting.grow_ahead(request, int(computed[row]) + limit)
            step.delta.draft_limits += (row, limit)
            self._asked[row] = request
        if len(chosen):
            step.delta.least_chance = self.rates.least_chance(
                rows.num_active, plain_s, self._marginal_s(rows.num_active)
            )

    def _marginal_s(self, num_rows: int) -> float:
        """Return the seconds that a draft adds to a step."""
        seconds = self._choice.costs.seconds(num_rows, num_rows)
        return (seconds[-1] - seconds[0]) / num_rows

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        now, batch = self.clock(), entry.batch
        seconds, self._last_result_at = now - self._last_result_at, now
        was_busy, self._was_busy = self._was_busy, self._scheduler.rows.num_active > 0
        was_asked, self._was_asked = self._was_asked, output.draft_work is not None
        work = output.draft_work
        if work is not None:
            self._made_by_row = self._decode(work)
            self._asked = {}
        is_decode = not batch.num_prompt_tokens and len(batch.sampled_rows) == len(batch.rows) > 0
        is_usual = is_decode and was_busy and was_asked == self._was_asked
        if is_usual and (work is None or not work.num_late_tokens):
            num_tokens = len(new_tokens.token_ids) // 4
            self.rates.on_step(len(batch.rows), num_tokens, seconds, work)

    def _decode(self, work: DraftWork) -> dict[int, _Made]:
        """Return the drafts of a step's result by row, of requests that still have their rows. ProtocolError if they
        are malformed, or of rows that did not ask."""
        frame, chances = np.frombuffer(work.drafts, np.int32), np.frombuffer(work.chances, np.float32)
        rows, made, start, num_drafts = self._scheduler.rows, dict[int, _Made](), 0, 0
        while start < len(frame):
            row, count = _head(frame, start)
            token_ids = frame[start + 2 : start + 2 + count].tolist()
            found = chances[num_drafts : num_drafts + count].tolist()
            asking = self._asked.get(row)
            if count < 1 or len(token_ids) < count or len(found) < count or asking is None or row in made:
                raise ProtocolError(f"row {row} brought {count} drafts, of which there are {len(token_ids)}")
            if rows.request_by_row[row] is asking:
                made[row] = _Made(asking, int(rows.num_tokens[row]), Match(SOURCE, 0, token_ids, tuple(found)))
            start, num_drafts = start + 2 + count, num_drafts + count
        return made

    def reset(self, lost: object) -> None:
        self._made_by_row.clear()
        self._asked = {}


def _head(frame: Ids, start: int) -> tuple[int, int]:
    """Return the row and the number of drafts at a place of a frame; (-1, 0) at its end."""
    if start + 2 > len(frame):
        return -1, 0
    row, count = frame[start : start + 2].tolist()
    return row, count
