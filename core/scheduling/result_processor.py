"""ResultProcessor: applies a step's result: appends tokens to rows that still have their request, and ends requests.

A result has any number of tokens for a row; one for each row of an unchanged batch is the fast path. Jump-forward
tokens, about which a grammar leaves no choice, are appended while the step that samples the first of them is in flight;
that step must sample the same token. Knows no queue and no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...ipc.codec import num_ids
from ...ipc.errors import ErrorInfo, ProtocolError, RequestError, error_info
from ...ipc.messages.base import BulkArray, FinishReason
from ...ipc.messages.workers import ModelRunnerOutput, RowLogprobs
from ..request import Ids, Request, State
from .logprob_table import KeyLogprobsByFrontend, LogprobTable
from .step.batch import Batch, TokenOwners
from .step.ledger import LedgerEntry
from .step.rows import Rows
from .step.step_delta import StepDelta

_NO_TOKEN = error_info(
    RequestError(
        "no token may come next: bad_words, allowed_token_ids, min_tokens, logits_processors and structured_outputs "
        "together rule out all; loosen one of them"
    )
)


class NewTokens(NamedTuple):
    """New tokens as columns of equal length; the tokens of a request are in order."""

    token_owners: TokenOwners
    starts: bytes  # int32: output index of each token
    token_ids: bytes  # int32
    logprobs: KeyLogprobsByFrontend = ()  # of the output tokens, for requests that asked for them
    prompt_logprobs: KeyLogprobsByFrontend = ()


class FinishedRequest(NamedTuple):
    request: Request
    reason: FinishReason
    vector: BulkArray | None = None  # embedding of the prompt, if the request asked for one
    error: ErrorInfo | None = None  # with reason "error"


class _Columns(NamedTuple):
    """Tokens with their rows and positions, before any request is finished."""

    rows: npt.NDArray[np.integer]
    positions: Ids  # in the request, its first prompt token is 0
    token_ids: Ids

    def select(self, mask: npt.NDArray[np.bool_]) -> _Columns:
        return _Columns(self.rows[mask], self.positions[mask], self.token_ids[mask])


class ResultProcessor:
    """Processor of the results of steps: it writes into the scheduler's rows. `release` frees a finished request's row
    and blocks."""

    def __init__(
        self,
        rows: Rows,
        delta: StepDelta,
        release: Callable[[Request], None],
        on_verified: Callable[[int, int, int], None],
    ) -> None:
        """on_verified: called with a row, the number of its drafts, and how many of them were right."""
        self._rows, self._delta, self._release, self._on_verified = rows, delta, release, on_verified

    def process(self, output: ModelRunnerOutput, entry: LedgerEntry) -> tuple[NewTokens, list[FinishedRequest]]:
        """Apply the result of the step in `entry`; return the new tokens and the requests that it finishes.
        ProtocolError if the result does not fit the step."""
        batch, state = entry.batch, self._rows
        finished: list[FinishedRequest] = []
        token_owners, may_be_full = batch.token_owners, entry.number + 1 == batch.num_steps
        is_plain = batch.version == state.version and output.rows == batch.sampled_frame
        is_plain = is_plain and output.counts == token_owners.counts and not output.fully_masked_rows
        is_plain = is_plain and not batch.drafts
        if is_plain:  # one token for each row, and nothing has changed since the step was made
            rows = batch.sampled_rows
            counts: npt.NDArray[np.integer] = batch.sampled_counts
            new = _Columns(rows, state.num_tokens[rows], _decode(output.token_ids, len(rows), output.step))
            may_end = may_be_full or state.num_rows_by_stop_id
            reasons = self._end_reasons(new, may_be_full=may_be_full) if may_end else None
            reason_by_row = {int(rows[index]): reason for index, reason in reasons.items()} if reasons else {}
        else:
            new = self._unknown_tokens(output, entry)
            new, finished = self._finish_masked(new, output.fully_masked_rows)
            new, reason_by_row = self._cut_at_ends(new)
            token_owners, counts = TokenOwners(state, new.rows), np.bincount(new.rows, minlength=len(state.epoch))
        new_tokens = _new_tokens(token_owners, new)
        places = batch.sampled_places + entry.number if is_plain else state.places(new.rows, new.positions)
        # Before these tokens finish a request: its release copies the tokens of its row and frees the row.
        state.append(places, new.token_ids, counts)
        if output.logprobs is not None:
            new_tokens = new_tokens._replace(logprobs=self._output_logprobs(output.logprobs, entry, new))
        if output.prompt_logprobs is not None:
            new_tokens = new_tokens._replace(prompt_logprobs=self._prompt_logprobs(output.prompt_logprobs, entry))
        if output.pooled or len(batch.pooled_rows):
            finished += self._finish_pooled(output, entry)
        if reason_by_row:
            finished += [FinishedRequest(self._finish(row), reason) for row, reason in reason_by_row.items()]
        return new_tokens, finished

    def _unknown_tokens(self, output: ModelRunnerOutput, entry: LedgerEntry) -> _Columns:
        """Return the new tokens of requests that still have their rows. A row without a token computes its last token
        again. ProtocolError if a row has no result, or a token differs from the known one at its position."""
        # Steps overlap: this one was made before the results of those before it had come. Since then a row may
        #  - have another request, or none: its epoch has changed, and the result is dropped;
        #  - have been rewound, since an earlier step had no token for it: the result begins one position earlier;
        #  - have received jump-forward tokens: the result repeats the first of them, which is known.
        batch, state = entry.batch, self._rows
        rows = batch.sampled_rows
        counts = _counts_of(output, rows)
        is_live = state.epoch[rows] == batch.sampled_epochs
        starts = batch.sampled_ends + entry.number - (state.num_rewound[rows] - batch.sampled_rewound)
        num_known = state.num_tokens[rows]
        is_next = is_live & (starts == num_known)
        if (is_next & (counts < 0)).any():
            raise ProtocolError(f"step {output.step}: no result for rows {rows[is_next & (counts < 0)].tolist()}")
        is_rewound = is_next & (counts == 0)
        if state.have_states and is_rewound.any():
            raise ProtocolError(
                f"step {output.step}: rows {rows[is_rewound].tolist()} have a state and brought no token"
            )
        state.rewind(rows[is_rewound])
        counts = np.maximum(counts, 0)
        token_ids = _decode(output.token_ids, int(counts.sum()), output.step)
        index = np.repeat(np.arange(len(rows)), counts)
        positions = starts[index] + (np.arange(len(index)) - (np.cumsum(counts) - counts)[index]).astype(np.int32)
        is_new = is_live[index] & (positions >= num_known[index])
        is_known = is_live[index] & ~is_new
        if batch.drafts:
            self._settle_drafts(output, batch, is_live, counts, token_ids)
        known_rows = rows[index[is_known]]
        is_other = state.tokens[known_rows, positions[is_known]] != token_ids[is_known]
        if is_other.any():
            others = known_rows[is_other].tolist()
            raise ProtocolError(f"step {output.step}: rows {others} sampled a token that differs from the known one")
        if (counts != 1).any():
            state.version += 1
        return _Columns(rows[index[is_new]], positions[is_new], token_ids[is_new])

    def _settle_drafts(
        self, output: ModelRunnerOutput, batch: Batch, is_live: npt.NDArray[np.bool_], counts: Ids, token_ids: Ids
    ) -> None:
        """Take back the wrong drafts of live rows. ProtocolError if the tokens of a row do not fit its drafts: all but
        the last must equal them. counts, token_ids: the result's tokens of all sampled rows."""
        ends = np.cumsum(counts).tolist()
        for row, end, count, has_row in zip(
            batch.sampled_rows.tolist(), ends, counts.tolist(), is_live.tolist(), strict=True
        ):
            drafts = batch.drafts.get(row)
            if drafts is None:
                continue
            kept = token_ids[end - count : end].tolist()
            if count > len(drafts) + 1 or kept[:-1] != drafts[: max(count - 1, 0)]:
                raise ProtocolError(f"step {output.step}: row {row} brought the tokens {kept} for the drafts {drafts}")
            if has_row:
                is_last_right = kept[-1:] == drafts[count - 1 : count]
                self._on_verified(row, len(drafts), count if is_last_right else max(count - 1, 0))
        is_settled = is_live & (self._rows.num_drafts[batch.sampled_rows] > 0)
        self._rows.settle_drafts(batch.sampled_rows[is_settled], counts[is_settled])
        self._rows.version += 1

    def _finish_masked(self, new: _Columns, masked_rows: bytes) -> tuple[_Columns, list[FinishedRequest]]:
        """Finish the requests of `masked_rows`, whose rules allow no token, with an error. Return the tokens of the
        other rows, and these requests."""
        is_masked = np.isin(new.rows, np.frombuffer(masked_rows, np.int32))
        rows = np.unique(new.rows[is_masked]).tolist()
        return new.select(~is_masked), [FinishedRequest(self._finish(row), "error", error=_NO_TOKEN) for row in rows]

    def _cut_at_ends(self, new: _Columns) -> tuple[_Columns, dict[int, FinishReason]]:
        """Return the tokens without those after the one that ends their request, and the finish reasons by row."""
        reason_by_row: dict[int, FinishReason] = {}
        last = np.full(len(self._rows.epoch), len(new.rows))  # by row: index of the last token that counts
        rows = new.rows.tolist()
        for index, reason in sorted(self._end_reasons(new).items()):
            if rows[index] not in reason_by_row:
                reason_by_row[rows[index]], last[rows[index]] = reason, index
        is_kept = np.arange(len(rows)) <= last[new.rows]
        return new.select(is_kept), reason_by_row

    def _end_reasons(self, new: _Columns, *, may_be_full: bool = True) -> dict[int, FinishReason]:
        """Return finish reasons by index of the tokens that end a request. may_be_full: rows may reach their limits."""
        reasons: dict[int, FinishReason] = {}
        state = self._rows
        if may_be_full:
            is_full = new.positions + 1 >= state.token_limit[new.rows]
            reasons = dict.fromkeys(np.flatnonzero(is_full).tolist(), "length")
        if state.num_rows_by_stop_id:
            token_ids = new.token_ids.tolist()
            if not state.num_rows_by_stop_id.keys().isdisjoint(token_ids):
                columns = zip(new.rows.tolist(), new.positions.tolist(), token_ids, strict=True)
                reasons |= {index: "stop" for index, each in enumerate(columns) if state.is_stop(*each)}
        return reasons

    def append_jump_tokens(self, jumps: Iterable[tuple[Request, list[int]]]) -> NewTokens:
        """Append the jump-forward tokens of requests, and return those that were appended.

        The step in flight samples the first jump-forward token of a request, and must sample the same; a later step
        computes all of them. They are cut before a stop token and before the request's last token. A request gets none
        if fewer than 2 are left, if it has no row or unscheduled tokens, or if its next step is in flight, too."""
        state, rows, positions, new_ids = self._rows, list[int](), list[int](), list[int]()
        for request, token_ids in jumps:
            row = request.row
            if row < 0 or state.num_scheduled[row] != state.num_tokens[row]:
                continue
            start, num_left = int(state.num_tokens[row]), int(state.token_limit[row] - state.num_tokens[row])
            stops = (i for i, token_id in enumerate(token_ids) if token_id in request.stop_token_ids)
            ids = token_ids[: min(next(stops, len(token_ids)), num_left - 1)]
            if len(ids) > 1:
                self._delta.append_tokens(row, ids[1:])
                rows += [row] * len(ids)
                positions += range(start, start + len(ids))
                new_ids += ids
        new = _Columns(*np.array([rows, positions, new_ids], np.int32))
        counts = np.bincount(new.rows, minlength=len(state.epoch))
        state.append(state.places(new.rows, new.positions), new.token_ids, counts)
        state.version += bool(rows)
        return _new_tokens(TokenOwners(state, new.rows), new)

    def _output_logprobs(self, columns: RowLogprobs, entry: LedgerEntry, new: _Columns) -> KeyLogprobsByFrontend:
        """Return the logprobs of the output tokens in `new` under their requests' keys."""
        table = self._live_logprobs(columns, entry)
        places = new.rows.astype(np.int64) << 32 | new.positions
        table = table.select(np.isin(table.rows.astype(np.int64) << 32 | table.positions, places))
        rows, state = table.rows, self._rows
        positions = table.positions - state.num_prompt_tokens[rows]
        return table.by_frontend(state.frontend_id[rows], state.request_key[rows], positions)

    def _prompt_logprobs(self, columns: RowLogprobs, entry: LedgerEntry) -> KeyLogprobsByFrontend:
        """Return logprobs of prompt tokens under their requests' keys, and record in the requests that they are
        delivered."""
        table, state = self._live_logprobs(columns, entry), self._rows
        rows = table.rows
        for row in np.unique(rows).tolist():
            state.request(row).note_prompt_logprobs(int(table.positions[rows == row].max()) + 1)
        return table.by_frontend(state.frontend_id[rows], state.request_key[rows], table.positions)

    def _live_logprobs(self, columns: RowLogprobs, entry: LedgerEntry) -> LogprobTable:
        """Return the logprobs of rows that still belong to the same request. ProtocolError if a row is not in the
        step."""
        table, batch = LogprobTable.of(columns), entry.batch
        index = np.searchsorted(batch.rows, table.rows)
        if (index == len(batch.rows)).any() or (batch.rows[index] != table.rows).any():
            raise ProtocolError(f"step {entry.step}: logprobs came for rows that were not in it")
        return table.select(self._rows.epoch[table.rows] == batch.epochs[index])

    def _finish_pooled(self, output: ModelRunnerOutput, entry: LedgerEntry) -> list[FinishedRequest]:
        """Finish and return the requests whose prompts the step has embedded, if they still have their rows.
        ProtocolError if the result has vectors of other rows than the step."""
        batch = entry.batch
        rows, epochs = batch.pooled_rows.tolist(), batch.pooled_epochs.tolist()
        vector_by_row = {pooled.row: pooled.vector for pooled in output.pooled}
        if vector_by_row.keys() != set(rows):
            raise ProtocolError(f"step {entry.step}: {len(vector_by_row)} rows were embedded, {len(rows)} had to be")
        live = [row for row, epoch in zip(rows, epochs, strict=True) if self._rows.epoch[row] == epoch]
        return [FinishedRequest(self._finish(row), "stop", vector_by_row[row]) for row in live]

    def _finish(self, row: int) -> Request:
        request = self._rows.request(row)
        self._release(request)
        request.move(State.FINISHED)
        return request


def _new_tokens(token_owners: TokenOwners, new: _Columns) -> NewTokens:
    starts = new.positions - token_owners.num_prompt_tokens
    return NewTokens(token_owners, starts.tobytes(), new.token_ids.tobytes())


def _counts_of(output: ModelRunnerOutput, asked_rows: npt.NDArray[np.intp]) -> Ids:
    """Return the number of tokens of each asked row: [len(asked_rows)], -1 if it has no result. ProtocolError if the
    result has other rows, or rows out of order."""
    rows, counts = np.frombuffer(output.rows, np.int32), np.frombuffer(output.counts, np.int32)
    index = np.searchsorted(asked_rows, rows)
    is_asked = len(rows) == 0 or (index[-1] < len(asked_rows) and np.array_equal(asked_rows[index], rows))
    if not is_asked or len(counts) != len(rows) or (counts < 0).any() or (np.diff(index) <= 0).any():
        raise ProtocolError(
            f"step {output.step}: rows {rows.tolist()} brought {counts.tolist()} tokens, {asked_rows.tolist()} were "
            "asked for"
        )
    counts_of = np.full(len(asked_rows), -1, np.int32)
    counts_of[index] = counts
    return counts_of


def _decode(token_ids: bytes, num_tokens: int, step: int) -> Ids:
    if len(token_ids) != 4 * num_tokens:
        raise ProtocolError(f"step {step}: {num_ids(token_ids)} tokens came, the counts say {num_tokens}")
    return np.frombuffer(token_ids, np.int32)
