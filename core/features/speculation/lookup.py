"""LookupProposer: finds where a row's last tokens occurred before, and drafts the tokens that followed there.

    tokens that came → indexes → a match for each row → chances of its drafts → N best of all rows → drafts

The chances are learned even if no drafts are sent: each match is compared with the tokens that come after it. A step
gets the number of drafts that gives the most tokens per second, which may be 0.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....ipc.messages.base import FinishReason
from ....ipc.messages.workers import ModelRunnerOutput
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.config.speculation import SpeculationOptions
from ...request import Ids, Request
from ...scheduling.drafting import Draft
from ...scheduling.result_processor import NewTokens
from ...scheduling.scheduler import Scheduler
from ...scheduling.step.ledger import LedgerEntry
from ...scheduling.step.rows import Rows
from ...scheduling.step_feature import StepFeature
from .choice import DraftChoice
from .corpus import Corpus
from .model_drafts import ModelDrafts
from .own_index import Match, OwnIndex
from .survival import Survival

logger = logging.getLogger("tokenloom.core")

IDLE_CHOICES = 8  # after as many choices without drafts, one more step passes between two searches for matches
MANY_ROWS, MANY_ROWS_REST, FEW_ROWS_REST = 8, 31, 3  # rows that count as many; most such steps with many, with few
MOST_LOOKED = 32  # rows for which matches are looked for at once


class _Guess(NamedTuple):
    """A match that coming tokens will confirm or refute."""

    request: Request
    match: Match
    start: int  # position of its first draft


class LookupProposer(StepFeature):
    """Proposer that owns the indexes, and the learned chances of drafts and costs of steps."""

    def __init__(
        self,
        options: SpeculationOptions,
        corpus: Corpus | None,
        scheduler: Scheduler,
        *,
        has_model: bool = False,
        shares_corpus: bool,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        steps_in_flight: int,
    ) -> None:
        """corpus: tokens of finished answers; None: only a request's own tokens are searched. shares_corpus: requests
        without a cache salt share their answers. has_model: there is a draft model."""
        self.clock: Callable[[], float] = time.monotonic
        self._scheduler = scheduler
        self._options, self._corpus, self._shares_corpus = options, corpus, shares_corpus
        self._index = OwnIndex(max_num_seqs, max_model_len)
        self.survival = Survival()
        self.choice = DraftChoice(max(max_num_seqs, 16), computes_twice=scheduler.rows.have_states)
        most = options.num_speculative_tokens
        self.model = ModelDrafts(scheduler, self.choice, most) if has_model else None
        self._vocab_size = vocab_size
        self._guess_by_row: dict[int, _Guess] = {}  # the newest match of each row
        self._open_by_row: dict[int, _Guess] = {}  # the match of each row with which coming tokens are compared
        self._known_tokens: Ids = np.zeros(max_num_seqs, np.int32)  # by row, when its match was looked for
        self._last_result_at, self._has_next, self._was_busy = 0.0, False, False
        self._steps_in_flight = steps_in_flight
        self._num_results = self._next_look = self._num_idle = 0  # choices of 0 in succession
        self._holds: bool | None = None  # the answer until the next result; None: not decided
        self.num_expected = 0.0

    # ── Proposer ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_corpus_tokens(self) -> int:
        return 0 if self._corpus is None else self._corpus.num_tokens

    @property
    def may_propose(self) -> bool:
        return self._num_results >= self._next_look

    def holds_next_step(self, rows: Rows) -> bool:
        if self._holds is None:
            self._holds = bool((rows.num_drafts > 0).any()) or self._should_wait(rows)
        return self._holds

    def _should_wait(self, state: Rows) -> bool:
        """Return whether the next step should wait for the result of the one in flight. It depends on the drafts that
        could be sent now, and on those that could follow if that step samples the first token of each match."""
        if (looked := self._looked(state)) is None:
            return False
        chances = self._chances(state, looked)
        num_rows = state.num_active
        self.choice.consider([chance for chance, _ in chances], num_rows)
        later = list[float]()
        for row in looked.tolist():
            later += sorted((chance for chance, owner in chances if owner == row), reverse=True)[1:]
        waits = self.choice.waits(num_rows) or self.choice.pays(sorted(later, reverse=True), num_rows)
        self._rest(num_rows, is_idle=not waits)
        return waits

    def propose(self, rows: Rows, limits: Ids) -> Mapping[int, Draft]:
        if (looked := self._looked(rows)) is None:
            return {}
        chances = self._chances(rows, looked)
        values, num_rows = [chance for chance, _ in chances], rows.num_active
        count = self.choice.choose(values, num_rows)
        self._rest(num_rows, is_idle=not count and not self.choice.waits(num_rows))
        self.num_expected += sum(values[:count])
        counts = Counter(row for _, row in chances[:count])
        drafts = {}
        for row, num_drafts in counts.items():
            guess = self._guess_by_row[row]
            token_ids = self._valid(guess.match.token_ids[: min(num_drafts, int(limits[row]))])
            if token_ids:
                drafts[row] = Draft(guess.match.source, token_ids)
                self._open(row, guess)
        return drafts

    # ── StepFeature ──────────────────────────────────────────────────────────────────────────────────────────────

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        """Learn what a step has cost: the seconds between the result before it and its own."""
        batch, now = entry.batch, self.clock()
        seconds, was_ahead = now - self._last_result_at, self._has_next or self._steps_in_flight == 1
        was_busy, self._was_busy = self._was_busy, self._scheduler.rows.num_active > 0
        self._last_result_at, self._has_next, self._holds = now, len(self._scheduler.ledger) > 0, None
        self._num_results += 1
        if batch.drafts or output.draft_work is not None:
            self._next_look = self._num_results
        if output.draft_work is not None:
            seconds -= output.draft_work.duration_s
        is_decode = not batch.num_prompt_tokens and len(batch.sampled_rows) == len(batch.rows) > 0
        num_rows = len(batch.rows)
        cost_s = seconds if is_decode and was_busy else None
        self.choice.on_result(num_rows, batch.num_tokens - num_rows, cost_s, is_alone=not was_ahead)

    def end(self, request: Request, reason: FinishReason | None) -> None:
        """Add the answer of a request that has ended by itself to the corpus."""
        self.survival.forget(request)
        is_whole = reason in ("stop", "length")
        if is_whole and self._corpus is not None and (owner := self._owner_of(request)) is not None:
            self._corpus.add(owner, request.tokens[request.num_prompt_tokens : request.num_tokens])

    # ── matches ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _owner_of(self, request: Request) -> bytes | None:
        """Return the owner name under which a request shares its answer; None if no other request may find it."""
        salt, group = request.params.cache_salt, request.prompt_group
        adapter = b"" if request.adapter is None else request.adapter.digest
        if salt is not None:
            return b"salt" + adapter.ljust(64) + salt.encode()
        if self._shares_corpus:
            return b"all" + adapter
        return b"group" + group.to_bytes(8, "little") if group else None

    def _look(self, state: Rows, rows: npt.NDArray[np.intp]) -> None:
        """Compare the guesses of rows with their new tokens, and search for their next matches."""
        rows = rows[state.num_tokens[rows] != self._known_tokens[rows]]
        self._known_tokens[rows] = state.num_tokens[rows]
        rows = rows[state.num_tokens[rows] > state.num_prompt_tokens[rows]]
        if not len(rows):
            return
        hashes = self._index.update(state, rows)
        most = 2 * self._options.num_speculative_tokens
        for i, row in enumerate(rows.tolist()):
            request, end = state.request(row), int(state.num_tokens[row])
            match = self._index.find(state, row, hashes[:, i], most)
            if self._corpus is not None and (owner := self._owner_of(request)) is not None:
                other = self._corpus.find(owner, state.tokens[row], end, hashes[:, i], most)
                if other is not None and (match is None or other.length > match.length):
                    match = other
            if match is not None and match.length < self._options.prompt_lookup_min:
                match = None
            self._guess_by_row.pop(row, None)
            if (best := self._better(match, row, request, end)) is not None:
                self._guess_by_row[row] = _Guess(request, best, end)
            self._confirm(row, state)

    def _better(self, match: Match | None, row: int, request: Request, end: int) -> Match | None:
        """Return the match, or the draft model's drafts if more of them are likely to be right."""
        made = None if self.model is None else self.model.match(row, request, end)
        if made is None or match is None:
            return made or match
        return max(match, made, key=lambda each: sum(self.survival.products(each, request)))

    def _confirm(self, row: int, state: Rows) -> None:
        """Compare the row's open match with the tokens that came. If it was refuted or used up, learn from it and open
        the newest match."""
        guess = self._open_by_row.get(row)
        if guess is not None and guess.request is state.request_by_row[row]:
            num_right, num_came = self._num_right(guess, state)
            if num_right == num_came < len(guess.match.token_ids):
                return
            is_wrong = num_right < min(num_came, len(guess.match.token_ids))
            self.survival.learn(guess.match, guess.request, num_right, is_wrong=is_wrong)
        self._open_by_row.pop(row, None)
        if (newest := self._guess_by_row.get(row)) is not None:
            self._open_by_row[row] = newest

    def _open(self, row: int, guess: _Guess) -> None:
        """Make the match whose drafts are sent the open one, with which the coming tokens are compared."""
        if (known := self._open_by_row.get(row)) is not guess and known is not None and known.request is guess.request:
            self.survival.learn(known.match, known.request, guess.start - known.start, is_wrong=False)
        self._open_by_row[row] = guess

    def _num_right(self, guess: _Guess, state: Rows) -> tuple[int, int]:
        """Return how many drafts of a match were right, up to the first wrong one, and how many tokens have come."""
        came = state.tokens[guess.request.row, guess.start : state.num_tokens[guess.request.row]].tolist()
        pairs = zip(guess.match.token_ids, came, strict=False)
        wrong = next((i for i, (draft, token) in enumerate(pairs) if draft != token), None)
        return min(len(came), len(guess.match.token_ids)) if wrong is None else wrong, len(came)

    def _valid(self, token_ids: list[int]) -> list[int]:
        """Return the tokens before the first that is not in the vocabulary: placeholders of media may be beyond it."""
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                return token_ids[:i]
        return token_ids

    # ── the choice ───────────────────────────────────────────────────────────────────────────────────────────────

    def _looked(self, state: Rows) -> npt.NDArray[np.intp] | None:
        """Search for matches and return the rows that were searched for; None if no row may get drafts soon."""
        rows = np.flatnonzero(state.is_active)
        num_left = state.num_tokens[rows] - state.num_scheduled[rows]
        if not len(rows) or (num_left > state.most_left).any():  # prompts come first
            self._next_look = self._num_results + 1
            return None
        if not self.choice.is_ready(len(rows)):
            return None
        looked = rows
        if len(rows) > MOST_LOOKED:
            looked = np.sort(np.roll(rows, -self._num_results)[:MOST_LOOKED])
        self._look(state, looked)
        return looked

    def _chances(self, state: Rows, rows: npt.NDArray[np.intp]) -> list[tuple[float, int]]:
        """Return the chances of all drafts of these rows, (chance, row) each, the best first."""
        found = list[tuple[float, int]]()
        for row in rows.tolist():
            guess = self._guess_by_row.get(row)
            if guess is not None and guess.request is state.request_by_row[row]:
                products = self.survival.products(guess.match, guess.request)
                found += ((product, row) for product in products[: self._options.num_speculative_tokens])
        return sorted(found, reverse=True)

    def _rest(self, num_rows: int, *, is_idle: bool) -> None:
        """Search for matches less often while they are of no use, so that searching costs little."""
        self._num_idle = self._num_idle + 1 if is_idle else 0
        most = MANY_ROWS_REST if num_rows > MANY_ROWS else FEW_ROWS_REST
        self._next_look = self._num_results + min(self._num_idle // IDLE_CHOICES, most)


def lookup_of(spec: EngineSpec, scheduler: Scheduler, *, has_exact_drafts: bool) -> LookupProposer | None:
    """Return the proposer that the options ask for; None if they ask for none, if drafts could change rounding under
    `auto`, or if the model cannot take drafts back."""
    config, model = spec.config, spec.model
    options = config.speculation_options
    if options is None:
        return None
    if config.speculation == "auto" and not has_exact_drafts:
        logger.info("speculation is off: drafts could change rounding here; --speculation lookup allows that")
        return None
    if model.has_state or model.cross is not None:
        what = "keep states" if model.has_state else "attend to a clip"
        logger.info(
            "speculation is off: layers of %s %s, from which drafts cannot be taken back", model.architecture, what
        )
        return None
    return LookupProposer(
        options,
        Corpus(config.speculation_corpus_tokens) if config.speculation_corpus_tokens else None,
        scheduler,
        has_model=spec.draft is not None,
        shares_corpus=config.speculation_corpus == "shared",
        max_num_seqs=config.max_num_seqs,
        max_model_len=spec.max_model_len,
        vocab_size=model.vocab_size,
        steps_in_flight=config.steps_in_flight,
    )
