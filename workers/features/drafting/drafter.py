"""Drafter: guesses the next tokens of rows with a small model, the draft model, after a step's tokens are sampled.

    known tokens that the draft model lacks, and the last one → a token each → … until a row has its drafts

Drafts cost time and change no answer. So nothing depends on the draft model's keys and values: where they are missing,
as for a prompt that was computed while no drafts were wanted, they are computed when drafts are. They lie behind those
of the model in the blocks of the first KV group, and are found again with them.

A draft is drawn with the noise with which the model will draw the token at its place, so that both often agree.

A draft head reads the model's hidden states, too: that of the token before each of its own. Its keys and values lie at
the place of that token. Where states are missing, as those of a prompt that was found in blocks without keys of the
head, it attends to the tokens behind them alone: from the begin of a block on, with their true positions. The last
token of a block that another row has filled keeps the keys that the other row's next token gave it. Both only make
drafts right less often.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....ipc.codec import encode_ids
from ....ipc.messages.workers import DraftWork, SchedulerOutput
from ....ipc.spec.config.speculation import MAX_DRAFTS
from ...machine.arrays import F32, I32, I64, Bools, tuples_of
from ...machine.parallel import ParallelGroup
from ...sampling.drafts import NO_DRAFT
from ...sampling.sampler import Sampler
from ...step.input_batch import InputBatch
from ...step.model_step import StepModel, compute
from ...step.runner_feature import BegunStep, RunnerFeature
from ...step.step_inputs import GroupInputs, StepInputs
from ...step.step_layout import StepLayout
from .draft_blocks import DraftBlocks
from .head_states import HeadStates


class _Pass(NamedTuple):
    """Rows that the draft model computes together, and their tokens."""

    rows: I32  # [n]
    firsts: I64  # [n] position of each row's first token
    counts: I32  # [n] tokens of each
    token_ids: list[I32]  # of each row
    starts: I64  # [n] the first token that the row's tokens see
    states: Tensor | None = None  # [sum of counts, hidden_size] that a head reads, row by row


class Drafter(RunnerFeature):
    """Owner of the drafts that were made last, by row, and of the record of which keys and values are there."""

    orders = ("draft_limits",)

    def __init__(
        self,
        model: StepModel,
        caches: Sequence[Tensor],
        batch: InputBatch,
        group: ParallelGroup,
        sampler: Sampler | None,
        num_groups: int,
        most_tokens: int,
        states: HeadStates | None = None,
    ) -> None:
        """caches: of each KV group of the draft model. num_groups: of the engine's model. most_tokens: that the draft
        model computes after one step. sampler: of the first rank. states: for a head, which takes at each position the
        token behind it; None for a draft model."""
        self._model, self._caches, self._batch = model, caches, batch
        self._states, self._shift = states, 0 if states is None else 1
        self._group, self._sampler = group, sampler
        self._most_tokens = most_tokens
        self._columns = batch.columns
        num_rows = len(self._columns.block_tables)
        self._block_size = caches[0].shape[4]
        self._blocks = DraftBlocks(len(caches[0]), num_rows, self._block_size, num_groups)
        self._is_asked = False  # whether the step wants drafts
        # By row: position of the first draft that was made last, and the drafts with keys and values.
        self._guessed: dict[int, tuple[int, list[int]]] = {}

    def update(self, step: SchedulerOutput) -> None:
        self._is_asked = bool(step.draft_limits)
        for row in self._blocks.update(step):
            self._guessed.pop(row, None)
            if self._states is not None:
                self._states.forget(row)

    def prepare(self, inputs: StepInputs) -> StepInputs:
        return inputs if self._states is None else self._states.prepare(inputs, is_asked=self._is_asked)

    def read_hidden(self, hidden: Tensor, inputs: StepInputs, begun: BegunStep) -> None:
        if self._states is not None:
            self._states.keep(inputs, hidden)

    def clear(self) -> None:
        self._guessed.clear()
        self._blocks.forget_rows()

    def follow(self, step: SchedulerOutput, begun: BegunStep) -> None:
        if not step.draft_limits:
            return
        begun.enter("draft")
        start = time.monotonic()
        rows, limits = tuples_of("draft_limits", step.draft_limits, 2).T
        with torch.inference_mode():
            begun.draft_work = self._draft(rows, limits.astype(np.int64), step.least_chance, start)

    def _draft(self, rows: I32, limits: I64, least_chance: float, start: float) -> DraftWork:
        """Make up to `limits` drafts of each row. A row that misses more than a step computes gets none yet."""
        known = self._columns
        ends = known.num_tokens[rows] - self._shift
        starts, firsts = np.array([self._span(row) for row in rows.tolist()], np.int64).T
        limits = np.minimum(limits, known.num_slots[rows] + 1 - ends)
        before = np.cumsum(ends - firsts) - (ends - firsts)
        counts = np.minimum(ends - firsts, self._most_tokens - before)
        chosen = (limits > 0) & (counts > 0) & (starts <= firsts)
        rows, starts, firsts, ends = rows[chosen], starts[chosen], firsts[chosen], ends[chosen]
        limits, counts = limits[chosen], counts[chosen]
        drafts: list[list[int]] = [[] for _ in rows]
        chances: list[list[float]] = [[] for _ in rows]
        is_complete = firsts + counts == ends
        num_passes, work = 0, self._missing(rows, starts, firsts, counts)
        num_late = int(np.maximum(counts - (1 + MAX_DRAFTS), 0).sum())  # a step brings as many tokens at most
        products: F32 = np.ones(len(rows), np.float32)
        open_rows = np.arange(len(rows))
        while len(work.rows):
            token_ids, found, states = self._compute(work)
            num_passes += 1
            if num_passes == 1:
                self._note(rows, firsts, counts)
                open_rows, token_ids, found = open_rows[is_complete], token_ids[is_complete], found[is_complete]
                states = states[torch.from_numpy(is_complete)]
            products[open_rows] *= found
            goes_on: Bools = products[open_rows] >= least_chance
            if self._group.size > 1:
                token_ids, goes_on = self._agree(token_ids, goes_on)
            for index, token_id, chance in zip(
                open_rows[goes_on].tolist(), token_ids[goes_on].tolist(), found[goes_on].tolist(), strict=True
            ):
                drafts[index].append(token_id)
                chances[index].append(chance)
            goes_on &= limits[open_rows] > num_passes
            open_rows, token_ids = open_rows[goes_on], token_ids[goes_on]
            work = _Pass(
                rows[open_rows],
                ends[open_rows] + num_passes - 1,
                np.ones(len(open_rows), np.int32),
                list(token_ids[:, None]),
                starts[open_rows],
                None if self._states is None else states[torch.from_numpy(goes_on)],
            )
        for row, end, made in zip(rows.tolist(), ends.tolist(), drafts, strict=True):
            self._guessed[row] = end, made[:-1]  # the last was not computed
        frames = [(row, len(made), *made) for row, made in zip(rows.tolist(), drafts, strict=True) if made]
        return DraftWork(
            drafts=b"".join(map(encode_ids, frames)),
            chances=np.array([each for made in chances for each in made], np.float32).tobytes(),
            num_passes=num_passes,
            num_late_tokens=num_late,
            duration_s=time.monotonic() - start,
        )

    def _span(self, row: int) -> tuple[int, int]:
        """Return the position of the first token that the draft model sees in a row, and of the first known one that it
        has to compute: at most the last."""
        known, blocks = self._columns, self._columns.block_tables[row]
        end = int(known.num_tokens[row]) - self._shift
        if self._states is not None:
            return self._blocks.span(row, blocks, end - 1, self._states.reach(row, end))
        start, first = self._blocks.span(row, blocks, end - 1)
        guessed, made = self._guessed.pop(row, (0, []))
        if first == guessed:  # the drafts that were right are computed
            came = known.token_ids[row, first : min(first + len(made), end - 1)].tolist()
            pairs = zip(made, came, strict=False)
            first += next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(came))
        return start, first

    def _missing(self, rows: I32, starts: I64, firsts: I64, counts: I32 | I64) -> _Pass:
        """Return the pass that computes known tokens."""
        spans = zip(rows.tolist(), (firsts + self._shift).tolist(), counts.tolist(), strict=True)
        token_ids = [self._columns.token_ids[row, first : first + count] for row, first, count in spans]
        states = None
        if self._states is not None and len(rows):
            states = self._states.take(rows, firsts, counts)
        return _Pass(rows, firsts, counts.astype(np.int32), token_ids, starts, states)

    def _note(self, rows: I32, firsts: I64, counts: I32 | I64) -> None:
        """Record that known tokens have keys and values now."""
        for row, end in zip(rows.tolist(), (firsts + counts).tolist(), strict=True):
            self._blocks.note(row, self._columns.block_tables[row], end)

    def _compute(self, work: _Pass) -> tuple[I64, F32, Tensor]:
        """Compute tokens and draw the one after each row's last. Return the drawn tokens [n], how likely each is by the
        draft model [n], and the states [n, hidden_size] behind each row's last; on ranks but the first, tokens that are
        not used."""
        no_rows = np.zeros(len(work.rows), np.int32)
        layout = StepLayout.of(work.rows, work.counts, no_rows == 0, no_rows)
        places = layout.message_order  # of the rows, in compute order
        if places is None:
            places = np.arange(len(no_rows))
        order = np.argsort(places)
        firsts = work.firsts[order]
        token_rows, positions = layout.tokens(firsts)
        ends = firsts + layout.counts
        starts = work.starts[order]
        seq_lens = ends - starts
        tables = self._tables(layout.rows, starts // self._block_size, -(-int(seq_lens.max()) // self._block_size))
        blocks = positions // self._block_size
        slots = (self._columns.block_tables[token_rows, blocks] - blocks) * self._block_size + positions
        sampled = work.firsts + work.counts + self._shift
        inputs = StepInputs(
            rows=layout.rows,
            token_ids=np.concatenate([work.token_ids[index] for index in order.tolist()]).astype(np.int32),
            positions=positions,
            query_starts=layout.query_starts,
            seq_lens=seq_lens.astype(np.int32),
            groups=[GroupInputs(slots, tables)] * len(self._caches),
            num_decode_rows=layout.num_decode_rows,
            sampled_rows=work.rows,
            sampled_positions=sampled,
            sampled_tokens=layout.last_tokens[places],
            head_states=self._in_order(work, order),
        )
        hidden, logits = compute(self._model, inputs, self._caches, keeps_state=False)
        states = hidden[torch.from_numpy(inputs.sampled_tokens)]
        if self._group.rank:
            return np.zeros(len(work.rows), np.int64), np.zeros(len(work.rows), np.float32), states
        logits = logits[:, : self._batch.vocab_size]
        assert self._sampler is not None, "the first rank samples"
        token_ids = self._sampler.sample(logits, self._columns.sampling.take(work.rows), sampled)
        drawn = logits.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])[:, 0]
        chances: F32 = (drawn - logits.logsumexp(1)).exp().cpu().numpy()
        return token_ids, chances, states

    def _tables(self, rows: I32, firsts: I64, width: int) -> I32:
        """Return the block tables [n, width] of rows, each from its block `firsts` on."""
        tables = self._columns.block_tables
        columns = np.minimum(firsts[:, None] + np.arange(width), tables.shape[1] - 1)
        chosen: I32 = tables[rows[:, None], columns]
        return chosen

    def _in_order(self, work: _Pass, order: I64) -> Tensor | None:
        """Return the states that a head reads, rows in compute order."""
        if work.states is None or (order[1:] > order[:-1]).all():
            return work.states
        parts = torch.split(work.states, work.counts.tolist())
        return torch.cat([parts[index] for index in order.tolist()])

    def _agree(self, token_ids: I64, goes_on: Bools) -> tuple[I64, Bools]:
        """Return the first rank's tokens, and which rows go on there."""
        shared = torch.from_numpy(np.where(goes_on, token_ids, NO_DRAFT)).to(self._caches[0].device)
        token_ids = self._group.broadcast(shared).cpu().numpy()
        return token_ids, token_ids != NO_DRAFT
