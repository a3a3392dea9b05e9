"""What a step has brought, taken in: new tokens of rows that still belong to the same request, and who ends by them.

Tokens that a grammar forces are taken in before the step that samples the first of them is back; what that step then
says of it must be the same. Knows no queue and no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ..ipc.codec import num_ids
from ..ipc.errors import ErrorInfo, ProtocolError, RequestError, error_info
from ..ipc.messages import BulkArray, FinishReason, LogprobColumns, ModelRunnerOutput
from .batch import Labels
from .changes import Changes
from .ledger import LedgerEntry
from .logprob_table import LogprobTable
from .request import Ids, Request, State
from .rows import Rows

_NO_TOKEN = error_info(
    RequestError(
        "no token may come next: bad_words, allowed_token_ids, min_tokens, logits_processors and structured_outputs "
        "together rule out all; loosen one of them"
    )
)


class NewTokens(NamedTuple):
    """New tokens in columns of equal length; those of one answer in their order."""

    labels: Labels
    starts: Ids  # output index of each token
    token_ids: Ids
    logprobs: LogprobTable | None = None  # of those that asked
    prompt_logprobs: LogprobTable | None = None


class FinishedRequest(NamedTuple):
    request: Request
    reason: FinishReason
    vector: BulkArray | None = None  # of a prompt that was to be embedded
    error: ErrorInfo | None = None  # with reason "error"


class TokenIntake:
    """Writes into the scheduler's rows; `release` takes one that has ended off its row."""

    def __init__(self, rows: Rows, changes: Changes, release: Callable[[Request], None]) -> None:
        self._rows, self._changes, self._release = rows, changes, release

    def take(self, output: ModelRunnerOutput, entry: LedgerEntry) -> tuple[NewTokens, list[FinishedRequest]]:
        """The result of the step in `entry`. ProtocolError if it answers something else than was asked."""
        batch, state, finished = entry.batch, self._rows, list[FinishedRequest]()
        if output.rows != batch.sampling_frame or len(output.token_ids) != len(output.rows):
            num_new, num_asked = num_ids(output.token_ids), len(batch.sampling_rows)
            raise ProtocolError(f"step {output.step}: {num_new} rows were sampled, {num_asked} were asked for")
        rows, ends, labels = batch.sampling_rows, batch.sampling_ends + entry.number, batch.labels
        token_ids = np.frombuffer(output.token_ids, np.int32)
        if batch.version != state.version or output.barred_rows:
            is_live = state.epoch[rows] == batch.epochs[batch.samples]
            is_new = is_live & (state.num_tokens[rows] == ends)
            is_known = is_live & ~is_new
            self._check_forced(entry.step, rows[is_known], ends[is_known], token_ids[is_known])
            is_barred = is_new & np.isin(rows, np.frombuffer(output.barred_rows, np.int32))
            barred = rows[is_barred].tolist()
            finished = [FinishedRequest(self._finish(row), "error", error=_NO_TOKEN) for row in barred]
            is_new &= ~is_barred
            rows, ends, token_ids = rows[is_new], ends[is_new], token_ids[is_new]
            labels = Labels(state, rows)
        logprobs = self._labelled(output.logprobs, entry, is_of_prompt=False)
        prompt_logprobs = self._labelled(output.prompt_logprobs, entry, is_of_prompt=True)
        state.append(rows, ends, token_ids)
        finished += self._finish_pooled(output, entry)
        finished += self._finish_stopped(rows, token_ids, may_be_full=entry.number + 1 == batch.num_steps)
        return NewTokens(labels, ends - labels.num_prompt_tokens, token_ids, logprobs, prompt_logprobs), finished

    def _check_forced(self, step: int, rows: Ids, positions: Ids, token_ids: Ids) -> None:
        """ProtocolError if a row has sampled another token than the one that its grammar forced."""
        known = self._rows.tokens[rows, positions]
        if (known != token_ids).any():
            raise ProtocolError(f"step {step}: {token_ids} were sampled, {known} were forced")

    def take_forced(self, forced: Iterable[tuple[Request, list[int]]]) -> NewTokens:
        """Tokens that need no draw: the step in flight samples the first of them, a later one computes all. They stop
        short of the one that ends the request. Of a request that has more in flight than that step none is taken."""
        state, rows, positions, new_ids = self._rows, list[int](), list[int](), list[int]()
        for request, token_ids in forced:
            row = request.row
            if row < 0 or state.num_scheduled[row] != state.num_tokens[row]:
                continue
            start, num_left = int(state.num_tokens[row]), int(state.token_limit[row] - state.num_tokens[row])
            stops = (i for i, token_id in enumerate(token_ids) if token_id in request.stop_token_ids)
            ids = token_ids[: min(next(stops, len(token_ids)), num_left - 1)]
            if len(ids) > 1:
                state.extend(row, ids)
                self._changes.force(row, ids[1:])
                rows += [row] * len(ids)
                positions += range(start, start + len(ids))
                new_ids += ids
        forced_rows, starts, forced_ids = np.array([rows, positions, new_ids], np.int32)
        labels = Labels(state, forced_rows)
        return NewTokens(labels, starts - labels.num_prompt_tokens, forced_ids)

    def _labelled(self, columns: LogprobColumns | None, entry: LedgerEntry, is_of_prompt: bool) -> LogprobTable | None:
        """Logprobs of rows that still belong to the same request, under its key."""
        if columns is None:
            return None
        table, state = LogprobTable.of(columns), self._rows
        batch = entry.batch
        index = np.searchsorted(batch.rows, table.keys)
        if (index == len(batch.rows)).any() or (batch.rows[index] != table.keys).any():
            raise ProtocolError(f"step {entry.step}: logprobs came for rows that were not in it")
        table = table.select(state.epoch[table.keys] == batch.epochs[index])
        rows, positions = table.keys, table.positions
        if is_of_prompt:
            for row in np.unique(rows).tolist():
                state.request(row).note_prompt_logprobs(int(positions[rows == row].max()) + 1)
        else:
            positions = positions - state.num_prompt_tokens[rows]
        return table.label(state.owner[rows], state.key[rows], positions)

    def _finish_pooled(self, output: ModelRunnerOutput, entry: LedgerEntry) -> list[FinishedRequest]:
        """The prompts that the step has embedded, of requests that still have their rows."""
        batch = entry.batch
        if not (output.pooled or batch.has_pooled):
            return []
        rows, epochs = batch.rows[batch.pools].tolist(), batch.epochs[batch.pools].tolist()
        vector_by_row = {pooled.owner: pooled.vector for pooled in output.pooled}
        if vector_by_row.keys() != set(rows):
            raise ProtocolError(f"step {entry.step}: {len(vector_by_row)} rows were embedded, {len(rows)} had to be")
        live = [row for row, epoch in zip(rows, epochs, strict=True) if self._rows.epoch[row] == epoch]
        return [FinishedRequest(self._finish(row), "stop", vector_by_row[row]) for row in live]

    def _finish_stopped(self, rows: Ids, token_ids: Ids, *, may_be_full: bool) -> list[FinishedRequest]:
        """token_ids: the last of each row, just appended."""
        state, reason_by_row = self._rows, dict[int, FinishReason]()
        if may_be_full:
            is_full = state.num_tokens[rows] >= state.token_limit[rows]
            reason_by_row = dict.fromkeys(rows[is_full].tolist(), "length")
        if stop_ids := state.num_rows_by_stop_id.keys():
            ids = token_ids.tolist()
            if not stop_ids.isdisjoint(ids):
                stopped = (
                    row for row, token_id in zip(rows.tolist(), ids, strict=True) if state.is_stop(row, token_id)
                )
                reason_by_row |= dict.fromkeys(stopped, "stop")
        return [FinishedRequest(self._finish(row), reason) for row, reason in reason_by_row.items()]

    def _finish(self, row: int) -> Request:
        request = self._rows.request(row)
        self._release(request)
        request.move(State.FINISHED)
        return request
