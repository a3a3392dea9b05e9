"""What a step has brought, taken in: new tokens of rows that still belong to the same request, and who ends by them.

Tokens that a grammar forces are taken in before the step that samples the first of them is back; what that step then
says of it must be the same. Knows no queue and no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ..ipc.codec import decode_ids, num_ids
from ..ipc.errors import ErrorInfo, ProtocolError, RequestError, error_info
from ..ipc.messages.base import BulkArray, FinishReason
from ..ipc.messages.core import LogprobColumns
from ..ipc.messages.workers import ModelRunnerOutput
from .logprob_table import LogprobTable
from .request import Ids, Request, State
from .scheduling.batch import Labels
from .scheduling.ledger import LedgerEntry
from .scheduling.rows import Rows
from .scheduling.step_delta import Changes

_NO_TOKEN = error_info(
    RequestError(
        "no token may come next: bad_words, allowed_token_ids, min_tokens, logits_processors and structured_outputs "
        "together rule out all; loosen one of them"
    )
)


class NewTokens(NamedTuple):
    """New tokens in columns of equal length; those of one answer in their order."""

    labels: Labels
    start_frame: bytes  # int32: output index of each token
    token_frame: bytes  # int32
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
        batch = entry.batch
        if output.rows != batch.sampling_frame or len(output.token_ids) != len(output.rows):
            num_new, num_asked = num_ids(output.token_ids), len(batch.sampling_rows)
            raise ProtocolError(f"step {output.step}: {num_new} rows were sampled, {num_asked} were asked for")
        finished: list[FinishedRequest] = []
        rows = batch.sampling_rows
        new_tokens = NewTokens(batch.labels, batch.start_frame(entry.number), output.token_ids)
        if batch.version != self._rows.version or output.fully_masked_rows:
            rows, new_tokens, finished = self._take_changed(output, entry)
        if output.logprobs is not None or output.prompt_logprobs is not None:
            new_tokens = new_tokens._replace(
                logprobs=self._labelled(output.logprobs, entry, is_of_prompt=False),
                prompt_logprobs=self._labelled(output.prompt_logprobs, entry, is_of_prompt=True),
            )
        self._rows.append(rows, new_tokens.token_frame)
        if output.pooled or batch.has_pooled:
            finished += self._finish_pooled(output, entry)
        finished += self._finish_stopped(rows, new_tokens, may_be_full=entry.number + 1 == batch.num_steps)
        return new_tokens, finished

    def _take_changed(
        self, output: ModelRunnerOutput, entry: LedgerEntry
    ) -> tuple[Ids, NewTokens, list[FinishedRequest]]:
        """The rows whose tokens count, those tokens, and who ends without one, when rows have come, gone or been given
        tokens since the step was sent."""
        batch, state = entry.batch, self._rows
        rows, ends = batch.sampling_rows, batch.sampling_ends + entry.number
        token_ids = np.frombuffer(output.token_ids, np.int32)
        is_live = state.epoch[rows] == batch.epochs[batch.samples]
        is_new = is_live & (state.num_tokens[rows] == ends)
        is_known = is_live & ~is_new
        self._check_forced(entry.step, rows[is_known], ends[is_known], token_ids[is_known])
        is_barred = is_new & np.isin(rows, np.frombuffer(output.fully_masked_rows, np.int32))
        barred = rows[is_barred].tolist()
        finished = [FinishedRequest(self._finish(row), "error", error=_NO_TOKEN) for row in barred]
        is_new &= ~is_barred
        return rows[is_new], self._told(rows[is_new], ends[is_new], token_ids[is_new]), finished

    def _told(self, rows: Ids, positions: Ids, token_ids: Ids) -> NewTokens:
        """What frontends and grammars are told of tokens; `rows` may repeat."""
        labels = Labels(self._rows, rows)
        return NewTokens(labels, (positions - labels.num_prompt_tokens).tobytes(), token_ids.tobytes())

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
        return self._told(*np.array([rows, positions, new_ids], np.int32))

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
        rows, epochs = batch.rows[batch.pools].tolist(), batch.epochs[batch.pools].tolist()
        vector_by_row = {pooled.owner: pooled.vector for pooled in output.pooled}
        if vector_by_row.keys() != set(rows):
            raise ProtocolError(f"step {entry.step}: {len(vector_by_row)} rows were embedded, {len(rows)} had to be")
        live = [row for row, epoch in zip(rows, epochs, strict=True) if self._rows.epoch[row] == epoch]
        return [FinishedRequest(self._finish(row), "stop", vector_by_row[row]) for row in live]

    def _finish_stopped(self, rows: Ids, new_tokens: NewTokens, *, may_be_full: bool) -> list[FinishedRequest]:
        """new_tokens: the last of each row, just appended."""
        reason_by_row: dict[int, FinishReason] = {}
        state = self._rows
        if may_be_full:
            is_full = state.num_tokens[rows] >= state.token_limit[rows]
            reason_by_row = dict.fromkeys(rows[is_full].tolist(), "length")
        if state.num_rows_by_stop_id:
            token_ids = decode_ids(new_tokens.token_frame)
            if not state.num_rows_by_stop_id.keys().isdisjoint(token_ids):
                last = zip(rows.tolist(), token_ids, strict=True)
                reason_by_row |= {row: "stop" for row, token_id in last if state.is_stop(row, token_id)}
        return [FinishedRequest(self._finish(row), reason) for row, reason in reason_by_row.items()]

    def _finish(self, row: int) -> Request:
        request = self._rows.request(row)
        self._release(request)
        request.move(State.FINISHED)
        return request
