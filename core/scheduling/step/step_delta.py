"""StepDelta: the changes since the last step, which the next step's message carries: freed and new rows, blocks and
tokens of rows, fills of adapter slots, work on media, and copies of blocks.

If a row is freed, its unsent changes are dropped. Knows no step and no pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from msgspec.structs import replace

from ....ipc.codec import encode_ids
from ....ipc.messages.adapter import FillSlot
from ....ipc.messages.media import Encode
from ....ipc.messages.workers import NewRow, RowSampling, SchedulerOutput
from ...kv.state_table import Moves
from ...request import Request
from .batch import Batch
from .step_copies import StepCopies


class StepDelta:
    """Collector of the changes, until `take` returns and removes them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._freed_rows: list[int] = []
        self._new_rows: list[NewRow] = []
        self._request_by_new_row: dict[int, Request] = {}  # their whole tables are sent
        self._block_appends: list[int] = []  # flat triples: row, group, block
        self._num_left: dict[tuple[int, int], int] = {}  # by row and group: entries that are the null block from now on
        self._state_moves: list[int] = []  # as in SchedulerOutput
        self._tokens_by_row: dict[int, list[int]] = {}
        self.fills: list[FillSlot] = []
        self.encodes: list[Encode] = []
        self.freed_entries: list[int] = []
        self.span_entries: list[int] = []  # flat triples: row, index of the span, entry
        self.copies: StepCopies | None = None
        self.draft_limits: list[int] = []  # flat pairs: row, most drafts
        self.least_chance = 0.0

    def admit(self, request: Request, num_computed_tokens: int) -> None:
        """Add a new row with the blocks that its tables have when the message is made. The first blocks already hold
        `num_computed_tokens` tokens."""
        self._new_rows.append(_new_row(request, num_computed_tokens))
        self._request_by_new_row[request.row] = request

    def append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        """Add that the only table of a running request has these new blocks."""
        if row not in self._request_by_new_row:
            for block in blocks:
                self._block_appends += (row, 0, block)

    def extend_tables(self, request: Request, num_new: int) -> None:
        """Add that the tables of a running request have `num_new` new blocks each, and that others may have left
        them."""
        row = request.row
        if row in self._request_by_new_row:
            return
        for group, table in enumerate(request.tables):
            for block in table.block_ids[-num_new:] if table.has_appends else ():
                self._block_appends += (row, group, block)
            if table.num_left:
                self._num_left[row, group] = table.num_left

    def move_states(self, group: int, moves_by_row: Iterable[tuple[int, Moves]]) -> None:
        """Add that the states of rows go on in other blocks of a group, all of them for the step that is made."""
        for row, moves in moves_by_row:
            for position, block in moves:
                self._state_moves += (row, group, position, block)

    def append_tokens(self, row: int, token_ids: list[int]) -> None:
        """Add one or more tokens of a row, which follow the token that the step in flight samples."""
        self._tokens_by_row[row] = token_ids

    def free(self, row: int) -> None:
        """Add that a row is free, and drop its unsent changes. A row that was never sent, because it waited for a
        medium, is not mentioned to workers at all."""
        known = [new_row for new_row in self._new_rows if new_row.row != row]
        if len(known) == len(self._new_rows):
            self._freed_rows.append(row)
        self._new_rows = known
        self._request_by_new_row.pop(row, None)
        self._num_left = {place: count for place, count in self._num_left.items() if place[0] != row}
        appends = self._block_appends
        kept = [i for i in range(0, len(appends), 3) if appends[i] != row]
        self._block_appends = [value for i in kept for value in appends[i : i + 3]]
        self._tokens_by_row.pop(row, None)

    @property
    def has_orders(self) -> bool:
        """Whether the workers have something to do in a step without rows."""
        return bool(self.fills or self.encodes) or self.copies is not None

    def take(self, step: int, core_epoch: int, generation: int, batch: Batch) -> SchedulerOutput:
        """Return the message of the next step of `batch`, with all changes, and remove these."""
        output = SchedulerOutput(
            step=step,
            core_epoch=core_epoch,
            generation=generation,
            rows=batch.row_frame,
            counts=batch.count_frame,
            drafts=batch.draft_frame,
            is_mask_pending=bool(batch.grammar_ids),
        )
        if self.encodes or self.span_entries:
            output = replace(
                output,
                encodes=self.encodes,
                freed_entries=encode_ids(self.freed_entries),
                span_entries=encode_ids(self.span_entries),
            )
            self.encodes, self.freed_entries, self.span_entries = [], [], []
        if self.draft_limits:
            output = replace(output, draft_limits=encode_ids(self.draft_limits), least_chance=self.least_chance)
            self.draft_limits = []
        if self.copies is not None:
            output = replace(output, stores=self.copies.stores, loads=self.copies.loads)
            self.copies = None
        if self._request_by_new_row:
            self._append_whole_tables()
        has_rows = bool(self._freed_rows or self._new_rows or self._block_appends or self._state_moves)
        if has_rows or self._tokens_by_row or self.fills:
            appends = ((row, len(ids), *ids) for row, ids in self._tokens_by_row.items())
            output = replace(
                output,
                freed_rows=encode_ids(self._freed_rows),
                new_rows=self._new_rows,
                block_appends=encode_ids(self._block_appends),
                block_frees=encode_ids(chain.from_iterable((*place, n) for place, n in self._num_left.items()))
                if self._num_left
                else b"",
                state_moves=encode_ids(self._state_moves) if self._state_moves else b"",
                token_appends=encode_ids(chain.from_iterable(appends)),
                fills=self.fills,
            )
            self.clear()
        return output

    def _append_whole_tables(self) -> None:
        for row, request in self._request_by_new_row.items():
            for group, table in enumerate(request.tables):
                for block in table.block_ids if table.has_appends else ():
                    self._block_appends += (row, group, block)


def _new_row(request: Request, num_computed_tokens: int) -> NewRow:
    params = request.params
    wants_prompt = request.num_prompt_logprobs < request.num_prompt_tokens
    return NewRow(
        row=request.row,
        token_ids=request.tokens[: request.num_tokens].tobytes(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        pooling=request.pooling,
        adapter_slot=request.adapter_slot,
        spans=encode_ids(chain.from_iterable((each.start, each.length, *each.grid) for each in request.media)),
        sampling=RowSampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=request.seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            bias_ids=encode_ids(params.logit_bias or ()),
            bias_values=np.array(list((params.logit_bias or {}).values()), np.float32).tobytes(),
            allowed_token_ids=encode_ids(params.allowed_token_ids or ()),
            bad_words=request.bad_words,
            min_tokens=params.min_tokens,
            stop_token_ids=encode_ids(request.stop_token_ids) if params.min_tokens else b"",
            logits_processors=request.logits_processors,
            extra_args=(request.logits_processors and params.extra_args) or {},
            thought_markers=request.thought_markers,
            thinking_token_budget=params.thinking_token_budget or 0,
            constraint_begins=[begin.token_ids for begin in request.constraint_begins if request.thought_markers],
            trace_token_ids=encode_ids(params.trace_decode_token_ids or ()),
            num_logprobs=-1 if params.num_logprobs is None else params.num_logprobs,
            logprob_token_ids=encode_ids(params.logprob_token_ids or ()),
            num_prompt_logprobs=params.prompt_logprobs if wants_prompt and params.prompt_logprobs is not None else -1,
            prompt_logprobs_start=request.num_prompt_logprobs if wants_prompt else 1,
        ),
    )
