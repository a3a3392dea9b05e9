"""LookupProposer: drafts from what the same tokens were followed by before, as many as their cost pays for.

    tokens that came → indexes → a match for each row → chances of its drafts → N best of all rows → drafts

The chances are learned whether drafts are sent or not: each match is compared with the tokens that come after it. A
step gets the drafts that bring the most tokens for each second, 0 among the choices.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.config.speculation import SpeculationOptions, speculation_options
from ..drafting import Draft
from ..request import Ids, Request
from ..scheduling.batch import Batch
from ..scheduling.rows import Rows
from .corpus import Corpus
from .own_index import Match, OwnIndex
from .step_costs import StepCosts
from .survival import Survival

logger = logging.getLogger("tokenloom.core")

GAIN = 1.03  # tokens for each second, against a step without drafts, from which on drafts are sent
FIRST_PAUSE, LAST_PAUSE = 64, 1024  # steps with another choice than the best, to learn what it costs now, are so rare
IDLE_CHOICES = 8  # choices without drafts after which a step more passes without a look for matches
MANY_ROWS, MANY_ROWS_REST, FEW_ROWS_REST = 8, 31, 3  # most such steps in succession
MOST_LOOKED = 32  # rows for which matches are looked for at once
NUM_PLAIN = 4  # choices without drafts, so that at least one step without drafts follows another


class _Guess(NamedTuple):
    """A match that tokens will confirm."""

    request: Request
    match: Match
    start: int  # position of its first draft


class LookupProposer:
    """Owns the indexes, and what is learned of chances and costs. `most_rows` bounds the draws of a step."""

    def __init__(
        self,
        options: SpeculationOptions,
        corpus: Corpus | None,
        *,
        shares_corpus: bool,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        steps_in_flight: int,
    ) -> None:
        """corpus: of finished answers. shares_corpus: requests without a cache salt use it, too."""
        self._options, self._corpus, self._shares_corpus = options, corpus, shares_corpus
        self._index = OwnIndex(max_num_seqs, max_model_len)
        self.costs, self.survival = StepCosts(), Survival()
        self._vocab_size = vocab_size
        self._most_draws = max(max_num_seqs, 16)
        self._guess_by_row: dict[int, _Guess] = {}  # the newest match of each row
        self._open_by_row: dict[int, _Guess] = {}  # the match of each row that the tokens that come are compared with
        self._known_tokens: Ids = np.zeros(max_num_seqs, np.int32)  # by row, when its match was looked for
        self._num_same_choices, self._pause, self._num_plain = 0, FIRST_PAUSE, 0
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
    def is_due(self) -> bool:
        return self._num_results >= self._next_look

    def holds_next_step(self, rows: Rows) -> bool:
        if self._holds is None:
            is_verifying = bool((rows.num_drafts > 0).any())
            self._holds = is_verifying or bool(self._choose(rows, np.flatnonzero(rows.is_active), 1))
        return self._holds

    def propose(self, rows: Rows, limits: Ids) -> Mapping[int, Draft]:
        drafts = {}
        for row, count in self._choose(rows, np.flatnonzero(rows.is_active), 0).items():
            guess = self._guess_by_row[row]
            token_ids = self._valid(guess.match.token_ids[: min(count, int(limits[row]))])
            if token_ids:
                drafts[row] = Draft(guess.match.source, token_ids)
                self._open(row, guess)
        return drafts

    def on_result(self, batch: Batch, now: float, *, has_next: bool, is_busy: bool) -> None:
        """Learn what a step has cost: the seconds from the result before to its own, at `now`. has_next: another step
        is in flight. is_busy: there are rows for the next one."""
        seconds, was_ahead = now - self._last_result_at, self._has_next or self._steps_in_flight == 1
        was_busy, self._was_busy = self._was_busy, is_busy
        self._last_result_at, self._has_next, self._holds = now, has_next, None
        self._num_results += 1
        if batch.drafts:
            self._next_look = self._num_results
        is_decode = not batch.num_prompt_tokens and len(batch.sampled_rows) == len(batch.rows) > 0
        if is_decode and was_busy and (batch.drafts or was_ahead):  # else the workers have waited for the step
            self.costs.on_step(len(batch.rows), batch.num_tokens - len(batch.rows), seconds)

    def on_finished(self, request: Request, *, is_whole: bool) -> None:
        """Forget a request that has ended. is_whole: keep its answer in the corpus."""
        self.survival.forget(request)
        if is_whole and self._corpus is not None and (owner := self._owner_of(request)) is not None:
            self._corpus.add(owner, request.tokens[request.num_prompt_tokens : request.num_tokens])

    # ── matches ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _owner_of(self, request: Request) -> bytes | None:
        """Return the name under which a request shares its answer; None: it shares it with nobody."""
        salt, group = request.params.cache_salt, request.prompt_group
        adapter = b"" if request.adapter is None else request.adapter.digest
        if salt is not None:
            return b"salt" + adapter.ljust(64) + salt.encode()
        if self._shares_corpus:
            return b"all" + adapter
        return b"group" + group.to_bytes(8, "little") if group else None

    def _look(self, state: Rows, rows: npt.NDArray[np.intp]) -> None:
        """Confirm the guesses of rows with new tokens, and look for their next matches."""
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
            self._guess_by_row.pop(row, None)
            if match is not None and match.length >= self._options.prompt_lookup_min:
                self._guess_by_row[row] = _Guess(request, match, end)
            self._confirm(row, state)

    def _confirm(self, row: int, state: Rows) -> None:
        """Compare the row's open match with the tokens that came; open the newest once it is decided."""
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
        """Compare the tokens that come with the match whose drafts are sent."""
        if (known := self._open_by_row.get(row)) is not guess and known is not None and known.request is guess.request:
            self.survival.learn(known.match, known.request, guess.start - known.start, is_wrong=False)
        self._open_by_row[row] = guess

    def _num_right(self, guess: _Guess, state: Rows) -> tuple[int, int]:
        """Return how many drafts of a match are tokens, up to the first that is not, and how many tokens came."""
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

    def _choose(self, state: Rows, rows: npt.NDArray[np.intp], num_unknown: int) -> dict[int, int]:
        """Return the number of drafts of each row that gets some. num_unknown: tokens in flight of each row, which are
        the first of each match."""
        if not len(rows) or (state.num_tokens[rows] - state.num_scheduled[rows] > 1).any():
            self._next_look = self._num_results + 1
            return {}  # prompts come first
        looked = rows
        if len(rows) > MOST_LOOKED:
            looked = np.sort(np.roll(rows, -self._num_results)[:MOST_LOOKED])
        self._look(state, looked)
        if self.costs.plain_s(len(rows)) is None or not self._guess_by_row:
            self._rest(len(rows), is_idle=True)
            return {}
        if self._num_plain:
            self._num_plain -= 1
            return {}
        gains = list[tuple[float, int]]()
        for row in looked.tolist():
            guess = self._guess_by_row.get(row)
            if guess is not None and guess.request is state.request_by_row[row]:
                products = self.survival.products(guess.match, guess.request)
                gains += ((product, row) for product in products[num_unknown:][: self._options.num_speculative_tokens])
        gains.sort(reverse=True)
        gains = gains[: min(self._most_draws - len(rows), self.costs.most_drafts(len(rows)))]
        seconds = self.costs.seconds(len(rows), len(gains))
        tokens = len(rows) + np.cumsum([0.0, *(gain for gain, _ in gains)])
        rates = tokens / np.array(seconds)
        best = int(rates.argmax())
        if rates[best] < GAIN * rates[0]:
            best = 0
        best = best if num_unknown else self._explored(best, rates)
        if not num_unknown:
            self.num_expected += float(tokens[best] - tokens[0])
        self._rest(len(rows), is_idle=best == 0)
        chosen = dict[int, int]()
        for _, row in gains[:best]:
            chosen[row] = chosen.get(row, 0) + 1
        return chosen

    def _rest(self, num_rows: int, *, is_idle: bool) -> None:
        """Look for matches more rarely while they bring nothing, so that looking costs little."""
        self._num_idle = self._num_idle + 1 if is_idle else 0
        most = MANY_ROWS_REST if num_rows > MANY_ROWS else FEW_ROWS_REST
        self._next_look = self._num_results + min(self._num_idle // IDLE_CHOICES, most)

    def _explored(self, best: int, rates: npt.NDArray[np.float64]) -> int:
        """Return the choice, or rarely the other: without drafts for some, or the best number of drafts for none."""
        if len(rates) == 1:
            return 0
        self._num_same_choices += 1
        if self._num_same_choices < self._pause:
            return best
        self._num_same_choices, self._pause = 0, min(2 * self._pause, LAST_PAUSE)
        if best:
            self._num_plain = NUM_PLAIN
            return 0
        return int(rates[1:].argmax()) + 1


def lookup_of(spec: EngineSpec) -> LookupProposer | None:
    """Return the proposer that the options ask for; None: there is none, or the model cannot take drafts back."""
    config, model = spec.config, spec.model
    options = speculation_options(config.speculation)
    if options is None:
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
        shares_corpus=config.speculation_corpus == "shared",
        max_num_seqs=config.max_num_seqs,
        max_model_len=spec.max_model_len,
        vocab_size=model.vocab_size,
        steps_in_flight=config.steps_in_flight,
    )
