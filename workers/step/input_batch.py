"""InputBatch: a worker's state of the running requests, one row each, from admission until the row is freed.

Tables and columns are numpy arrays indexed by row, so a step costs the same few array operations for 1 row as for 256;
Python loops only if rows change, or have logprobs, processors or forced tokens. Sampled tokens are appended here and
feed the next step without a round trip to the core.

Trusts no message: a row, block or count that the state does not allow raises ProtocolError, because a wrong slot would
silently corrupt another request's KV cache. The block tables are those of GroupTables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ipc.errors import ProtocolError
from ...ipc.messages.workers import NewRow
from ...ipc.spec.models.model_config import OutputRules
from ..machine.arrays import I32, I64, ids_of
from ..sampling.drafts import NO_DRAFT, StepDrafts, spread
from ..sampling.logits_processors import LogitsProcessors
from ..sampling.row_processors import CustomLogitsProcessor, ids_in
from ..sampling.sampling_columns import SamplingColumns
from .group_tables import NO_FREES, GroupTables
from .state_blocks import StateBlocks
from .step_inputs import ExpectedTokens, PromptSpan, StepInputs
from .step_layout import RowColumns, SamplingMetadata, StepLayout
from .step_tables import StepTables


class InputBatch:
    """Owner of the rows of one worker.

    Invariant: between two steps num_computed_tokens < num_tokens for each active row, except for a pooled row that is
    not freed yet. A token that the host does not know yet is stored as −1 − row.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: Sequence[int],
        vocab_size: int = 1 << 31,
        processors: Sequence[CustomLogitsProcessor] = (),
        max_loras: int = 0,
        rules: OutputRules | None = None,
        windows: Sequence[int | None] = (None,),
        num_state_blocks: int = 0,
        *,
        is_encoder: bool = False,
    ) -> None:
        """`num_blocks`, `windows`: of each KV group with keys and values, see GroupTables. `num_state_blocks`: of the
        group behind them, whose layers keep a state; 0: there is none. `processors` are the operator's own; rows select
        them by index. `max_loras`: slots for adapters. `rules`: of the model, for all rows. `is_encoder`: of text."""
        self._tables: GroupTables | StepTables
        if is_encoder:
            self._tables = StepTables(max_num_seqs, max_model_len, block_size, num_blocks[0])
        else:
            self._tables = GroupTables(max_num_seqs, max_model_len, block_size, num_blocks, windows)
        self._states = StateBlocks(max_num_seqs, len(windows), num_state_blocks) if num_state_blocks else None
        # The last sampled token of the longest row is stored, too, though never computed.
        self._token_ids: I32 = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._is_active = np.zeros(max_num_seqs, np.bool_)
        self._num_admissions: I64 = np.zeros(max_num_seqs, np.int64)
        self._num_tokens: I64 = np.zeros(max_num_seqs, np.int64)
        self._is_pooled = np.zeros(max_num_seqs, np.bool_)
        self._num_computed_tokens: I64 = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens: I64 = np.zeros(max_num_seqs, np.int64)
        # Cached from the step before until a row is freed.
        self._layout: StepLayout | None = None
        self._layout_key = (b"", b"")
        self._sampling_metadata: SamplingMetadata | None = None
        self._sampling = SamplingColumns.greedy(max_num_seqs)
        self._processors = LogitsProcessors(vocab_size, processors, rules)
        self.vocab_size = vocab_size
        self._max_loras = max_loras
        self._adapter_slots: I32 = np.zeros(max_num_seqs, np.int32)
        self._num_logprobs: I32 = np.full(max_num_seqs, -1, np.int32)
        self._logprob_ids: dict[int, I64] = {}  # by row: score these tokens, not the most likely ones
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # by row: number of most likely tokens, first position

    @property
    def highest_blocks(self) -> list[int]:
        """The highest block of each KV group that any row has ever had."""
        highest: list[int] = self._tables.highest_blocks.tolist()
        return highest if self._states is None else [*highest, self._states.highest_block]

    @property
    def columns(self) -> RowColumns:
        """The rows' columns, which change in place; block tables are those of the first KV group."""
        assert isinstance(self._tables, GroupTables), "rows of an encoder have no blocks"
        return RowColumns(self._token_ids, self._num_tokens, self._tables.num_slots, self._tables.first, self._sampling)

    @property
    def num_active(self) -> int:
        return int(np.count_nonzero(self._is_active))

    def token_ids(self, row: int) -> list[int]:
        """Return prompt and output of an active row."""
        ids: list[int] = self._token_ids[row, : self._num_tokens[row]].tolist()
        return ids

    def rows_of_adapter(self, slot: int) -> I64:
        """Return the active rows with the adapter of this slot."""
        return np.flatnonzero(self._is_active & (self._adapter_slots == slot))

    def sampling_metadata(self, rows: I32) -> SamplingMetadata:
        """Return the sampling parameters of these rows; cached by the identity of `rows`."""
        if self._sampling_metadata is None or self._sampling_metadata.rows is not rows:
            num_logprobs = self._num_logprobs[rows]
            indices = np.flatnonzero(num_logprobs >= 0)
            wanted = zip(rows[indices].tolist(), num_logprobs[indices].tolist(), strict=True)
            targets = [self._logprob_ids.get(row, count) for row, count in wanted]
            sampling, processors = self._sampling.take(rows), self._processors.of(rows)
            self._sampling_metadata = SamplingMetadata(rows, sampling, processors, indices, targets)
        return self._sampling_metadata

    def prompt_spans(self, layout: StepLayout) -> list[PromptSpan]:
        """Return the prompt tokens whose logprobs the step gives. Call it before `advance`."""
        if not self._prompt_logprobs:
            return []
        spans = []
        for i, row in enumerate(layout.rows.tolist()):
            if row in self._prompt_logprobs:
                num_top, start = self._prompt_logprobs[row]
                begin = int(self._num_computed_tokens[row])
                end = begin + int(layout.counts[i])
                first, last = max(begin + 1, start), min(end + 1, int(self._num_prompt_tokens[row]))
                if first < last:
                    index = int(layout.query_starts[i]) + first - 1 - begin
                    spans.append(PromptSpan(row, num_top, index, first, self._token_ids[row, first:last].copy()))
        return spans

    def clear(self) -> None:
        """Forget all rows."""
        self._forget_step()
        self._is_active[:] = False
        self._processors.clear()
        self._prompt_logprobs.clear()

    def free(self, rows: I32) -> None:
        """Free rows of finished or preempted requests."""
        if len(rows) == 0:
            return
        self._check_active(rows, "freed")
        self._forget_step()
        self._is_active[rows] = False
        self._processors.free(rows.tolist())
        for row in rows.tolist():
            self._prompt_logprobs.pop(row, None)

    def admit(self, new_row: NewRow) -> None:
        """Start or resume a request on a free row; `append_blocks` adds its blocks."""
        row, token_ids = new_row.row, ids_of(new_row.token_ids)
        if not 0 <= row < len(self._is_active):
            raise ProtocolError(f"row {row} is admitted, rows are [0, {len(self._is_active)})")
        if self._is_active[row]:
            raise ProtocolError(f"row {row} is admitted, but it was not freed")
        if not 0 <= new_row.num_computed_tokens < len(token_ids) < self._token_ids.shape[1]:
            raise ProtocolError(
                f"row {row} is admitted with {len(token_ids)} tokens, {new_row.num_computed_tokens} of them computed: "
                f"it must have one to compute and at most {self._token_ids.shape[1] - 1} in all"
            )
        if not 0 <= new_row.adapter_slot <= self._max_loras:
            raise ProtocolError(
                f"row {row} is admitted with adapter slot {new_row.adapter_slot}, slots are [1, {self._max_loras}]"
            )
        self._processors.admit(new_row)
        self._is_active[row] = True
        self._num_admissions[row] += 1
        self._is_pooled[row] = new_row.pooling is not None
        self._adapter_slots[row] = new_row.adapter_slot
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        self._num_computed_tokens[row] = new_row.num_computed_tokens
        self._num_prompt_tokens[row] = new_row.num_prompt_tokens
        self._tables.clear_row(row)
        if self._states is not None:
            self._states.clear_row(row)
        self._sampling.put(row, new_row.sampling)
        self._num_logprobs[row] = new_row.sampling.num_logprobs
        self._logprob_ids.pop(row, None)
        if new_row.sampling.logprob_token_ids:
            self._logprob_ids[row] = ids_in(new_row.sampling.logprob_token_ids, self.vocab_size)
        if new_row.sampling.num_prompt_logprobs >= 0:
            self._prompt_logprobs[row] = new_row.sampling.num_prompt_logprobs, new_row.sampling.prompt_logprobs_start

    def append_blocks(self, appends: I32, frees: I32 = NO_FREES) -> None:
        """Append blocks to block tables, and free those behind windows, see GroupTables.change. appends: [m, 3] row, KV
        group, block id; frees: [k, 3] row, KV group, number of blocks."""
        self._check_active(appends[:, 0], "given blocks")
        self._check_active(frees[:, 0], "relieved of blocks")
        self._tables.change(appends, frees, self._num_computed_tokens)

    def move_states(self, moves: I32, rows: I32) -> None:
        """Let the states of rows of the next step go on in other blocks, see StateBlocks.move. moves: [m, 4] row, KV
        group, position, block id. rows: of the step."""
        if self._states is None:
            if len(moves):
                raise ProtocolError(f"the states of rows {moves[:, 0].tolist()} move, but no layer keeps a state")
            return
        self._check_active(moves[:, 0], "given a state")
        self._states.move(moves, rows, self._num_computed_tokens)

    def load_states(self, loads: I32) -> None:
        """Record the blocks of states among those that were copied from slots. loads: [m, 2] slot, block, as in
        SchedulerOutput."""
        if self._states is not None:
            slots, blocks = loads.T
            self._states.load(blocks[self._states.are_own(slots)])

    def layout(self, row_frame: bytes, count_frame: bytes) -> StepLayout:
        """Return the layout of a step that computes the next `counts[i]` tokens of each `rows[i]`, in frames of int32;
        at least one row. ProtocolError if a row is not in use or comes twice, or if a row has no count of 1 or more."""
        key = row_frame, count_frame
        if self._layout is None or self._layout_key != key:
            rows, counts = ids_of(row_frame), ids_of(count_frame)
            self._check_active(rows, "scheduled")
            if len(rows) != len(counts) or counts.min() < 1 or len(set(rows.tolist())) != len(rows):
                raise ProtocolError(
                    f"{len(rows)} rows are scheduled with {len(counts)} counts: each once, at least 1 token"
                )
            self._layout = StepLayout.of(
                rows, counts, can_sample=~self._is_pooled[rows], adapter_slots=self._adapter_slots[rows]
            )
            self._layout_key = key
            self._tables.forget_step()
        return self._layout

    def prepare(self, layout: StepLayout, drafts: StepDrafts | None = None) -> StepInputs:
        """Return the inputs of the step; change no row. ProtocolError if a row has too few tokens or blocks for it, or
        drafts elsewhere than after its last token."""
        computed, num_tokens = self._num_computed_tokens[layout.rows], self._num_tokens[layout.rows]
        seq_lens = computed + layout.counts
        ends = num_tokens if drafts is None else num_tokens + drafts.counts
        self._check_ends(layout.rows, seq_lens, ends)
        token_rows, positions = layout.tokens(computed)
        groups = self._tables.of_step(layout.rows, token_rows, positions)
        sampled_rows, sampled_positions, sampled_tokens = layout.rows, num_tokens, layout.last_tokens
        is_sampled = seq_lens == ends
        if layout.can_sample is not None:
            is_sampled &= layout.can_sample
        if layout.message_order is not None or not is_sampled.all():
            order = np.arange(len(layout.rows)) if layout.message_order is None else layout.message_order
            order = order[is_sampled[order]]
            sampled_rows, sampled_positions = layout.rows[order], num_tokens[order]
            sampled_tokens = layout.last_tokens[order]
        token_ids = self._token_ids[token_rows, positions]
        states = None
        if self._states is not None:
            states = self._states.of_step(layout, computed, None if drafts is None else drafts.counts > 0)
        guesses = None
        if drafts is not None:
            drafts.check(layout.rows, is_sampled)
            token_ids[drafts.places(layout.last_tokens)] = drafts.token_ids
            counts = np.zeros(len(self._is_active), np.int64)
            counts[layout.rows] = drafts.counts
            counts = counts[sampled_rows]
            sampled_rows = np.repeat(sampled_rows, counts + 1)
            sampled_positions = spread(sampled_positions, counts + 1)
            sampled_tokens = spread(sampled_tokens - counts, counts + 1)
            guesses = np.full(len(sampled_rows), NO_DRAFT, np.int32)
            has_draft = np.append(sampled_rows[1:] == sampled_rows[:-1], False)
            guesses[has_draft] = token_ids[sampled_tokens[has_draft] + 1]
        return StepInputs(
            rows=layout.rows,
            token_ids=token_ids,
            positions=positions,
            query_starts=layout.query_starts,
            seq_lens=seq_lens.astype(np.int32),
            groups=groups,
            num_decode_rows=layout.num_decode_rows,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            sampled_tokens=sampled_tokens,
            token_slots=layout.token_slots,
            drafts=guesses,
            has_drafts=None if drafts is None else (drafts.counts > 0).astype(np.int32),
            states=states,
        )

    def advance(self, layout: StepLayout, drafts: StepDrafts | None = None) -> None:
        """Count the step's tokens as computed, except those of rows that keep a state and have drafts: a later step
        computes them again."""
        counts: I32 | I64 = layout.counts
        if self._states is not None:
            self._states.advance()
            if drafts is not None:
                counts = np.where(drafts.counts > 0, 0, counts)
        self._num_computed_tokens[layout.rows] += counts

    def append_tokens(self, rows: I32, token_ids: I64) -> None:
        """Append the sampled token of each row, also to its processors."""
        self._token_ids[rows, self._num_tokens[rows]] = token_ids
        self._num_tokens[rows] += 1
        self._processors.append(rows, token_ids)

    def append_kept(self, rows: I32, token_ids: I64) -> None:
        """Append the tokens that rows keep of their draws, and count all tokens before a row's last one as computed if
        no layer keeps a state.

        rows, token_ids: [s], a row once for each of its draws in succession; NO_DRAFT: not kept.
        """
        is_kept = token_ids != NO_DRAFT
        rows, token_ids = rows[is_kept], token_ids[is_kept]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        for row, kept in zip(rows[starts].tolist(), np.split(token_ids, starts[1:]), strict=True):
            start = int(self._num_tokens[row])
            self._token_ids[row, start : start + len(kept)] = kept
            self._num_tokens[row] = start + len(kept)
            if self._states is None:
                self._num_computed_tokens[row] = start + len(kept) - 1
            self._processors.follow(row, kept.tolist(), start + len(kept) - int(self._num_prompt_tokens[row]))

    def expect_tokens(self, rows: I32) -> ExpectedTokens:
        """Append a placeholder to each row for a token that the device samples. No row may have processors."""
        positions = self._num_tokens[rows]
        self._token_ids[rows, positions] = -1 - rows
        self._num_tokens[rows] += 1
        return ExpectedTokens(rows, positions, self._num_admissions[rows])

    def fill_tokens(self, expected: ExpectedTokens, token_ids: I64) -> None:
        """Replace the placeholders of `expect_tokens`, except in rows that were admitted again in the meantime."""
        is_same = self._num_admissions[expected.rows] == expected.admissions
        self._token_ids[expected.rows[is_same], expected.positions[is_same]] = token_ids[is_same]

    def append_forced(self, appends: I32) -> None:
        """Append tokens that the core forced without sampling. appends: for each row: row, n, n token ids."""
        start = 0
        while start < len(appends):
            row, count = appends[start : start + 2].tolist() if start + 2 <= len(appends) else (-1, 0)
            token_ids = appends[start + 2 : start + 2 + count]
            if count < 1 or len(token_ids) < count:
                raise ProtocolError(f"row {row} is given {count} tokens, of which there are {len(token_ids)}")
            rows = np.array([row], np.int32)
            self._check_active(rows, "given tokens")
            if self._num_tokens[row] + count > self._token_ids.shape[1]:
                raise ProtocolError(f"row {row} is given {count} tokens, it has {self._num_tokens[row]} already")
            for i in range(count):
                self.append_tokens(rows, token_ids[i : i + 1].astype(np.int64))
            start += 2 + count

    def _forget_step(self) -> None:
        self._layout = self._sampling_metadata = None
        self._tables.forget_step()

    def _check_active(self, rows: I32, verb: str) -> None:
        if len(rows) == 0:
            return
        if rows.min() < 0 or rows.max() >= len(self._is_active):
            raise ProtocolError(f"row {rows.min()} or {rows.max()} is {verb}, rows are [0, {len(self._is_active)})")
        if not self._is_active[rows].all():
            raise ProtocolError(f"row {rows[~self._is_active[rows]][0]} is {verb}, but it is not in use")

    def _check_ends(self, rows: I32, ends: I64, num_tokens: I64) -> None:
        num_slots = self._tables.num_slots[rows]
        if (ends <= np.minimum(num_tokens, num_slots)).all():
            return
        for limits, unit in ((num_tokens, "known tokens"), (num_slots, "slots")):
            i = int((ends - limits).argmax())
            if ends[i] > limits[i]:
                raise ProtocolError(f"row {rows[i]} is scheduled up to token {ends[i]}, it has {limits[i]} {unit}")
