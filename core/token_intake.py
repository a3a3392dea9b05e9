"""What a step has brought, taken in: new tokens of rows that still belong to the same request, and who ends by them.

Tokens that a grammar forces are taken in before the step that samples the first of them is back; what that step then
says of it must be the same. Knows no queue and no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ipc.errors import ErrorInfo, ProtocolError, RequestError, error_info
from ..ipc.messages import BulkArray, FinishReason, LogprobColumns, ModelRunnerOutput
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


@dataclass(frozen=True)
class NewTokens:
    """New tokens in columns of equal length; those of one answer in their order."""

    owner: Ids
    key: Ids
    start: Ids  # output index of the token
    token_ids: Ids
    grammar_ids: Ids  # 0: no grammar
    logprobs: LogprobTable | None = None  # of those that asked
    prompt_logprobs: LogprobTable | None = None


@dataclass(frozen=True)
class FinishedRequest:
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
        rows, ends = entry.sampling_rows, entry.ends[entry.samples]
        token_ids = np.frombuffer(output.token_ids, np.int32)
        if output.rows != rows.tobytes() or len(token_ids) != len(rows):
            raise ProtocolError(f"step {output.step}: {len(token_ids)} rows were sampled, {len(rows)} were asked for")
        state, finished = self._rows, list[FinishedRequest]()
        is_live = state.epoch[rows] == entry.epochs[entry.samples]
        is_new = is_live & (state.num_tokens[rows] == ends)
        if not is_new.all():
            self._check_forced(entry, is_live & ~is_new, token_ids)
        if output.barred_rows:
            is_barred = is_new & np.isin(rows, np.frombuffer(output.barred_rows, np.int32))
            barred = rows[is_barred].tolist()
            finished = [FinishedRequest(self._finish(row), "error", error=_NO_TOKEN) for row in barred]
            is_new &= ~is_barred
        if not is_new.all():
            rows, token_ids = rows[is_new], token_ids[is_new]
        logprobs = self._labelled(output.logprobs, entry, is_of_prompt=False)
        prompt_logprobs = self._labelled(output.prompt_logprobs, entry, is_of_prompt=True)
        new_tokens = self._told(rows, state.num_tokens[rows], token_ids, logprobs, prompt_logprobs)
        state.append(rows, token_ids)
        return new_tokens, finished + self._finish_pooled(output, entry) + self._finish_stopped(rows, token_ids)

    def _check_forced(self, entry: LedgerEntry, is_known: npt.NDArray[np.bool_], token_ids: Ids) -> None:
        """ProtocolError if a row has sampled another token than the one that its grammar forced."""
        known = self._rows.tokens[entry.sampling_rows[is_known], entry.ends[entry.samples][is_known]]
        if (known != token_ids[is_known]).any():
            raise ProtocolError(f"step {entry.step}: {token_ids[is_known]} were sampled, {known} were forced")

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

    def _told(
        self,
        rows: Ids,
        positions: Ids,
        token_ids: Ids,
        logprobs: LogprobTable | None = None,
        prompt_logprobs: LogprobTable | None = None,
    ) -> NewTokens:
        """What frontends and grammars are told of tokens; `rows` may repeat."""
        state = self._rows
        return NewTokens(
            owner=state.owner[rows],
            key=state.key[rows],
            start=positions - state.num_prompt_tokens[rows],
            token_ids=token_ids,
            grammar_ids=state.grammar_id[rows],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _labelled(self, columns: LogprobColumns | None, entry: LedgerEntry, is_of_prompt: bool) -> LogprobTable | None:
        """Logprobs of rows that still belong to the same request, under its key."""
        if columns is None:
            return None
        table, state = LogprobTable.of(columns), self._rows
        index = np.searchsorted(entry.rows, table.keys)
        if (index == len(entry.rows)).any() or (entry.rows[index] != table.keys).any():
            raise ProtocolError(f"step {entry.step}: logprobs came for rows that were not in it")
        table = table.select(state.epoch[table.keys] == entry.epochs[index])
        rows, positions = table.keys, table.positions
        if is_of_prompt:
            for row in np.unique(rows).tolist():
                state.request(row).note_prompt_logprobs(int(positions[rows == row].max()) + 1)
        else:
            positions = positions - state.num_prompt_tokens[rows]
        return table.label(state.owner[rows], state.key[rows], positions)

    def _finish_pooled(self, output: ModelRunnerOutput, entry: LedgerEntry) -> list[FinishedRequest]:
        """The prompts that the step has embedded, of requests that still have their rows."""
        if not (output.pooled or entry.pools.any()):
            return []
        rows, epochs = entry.rows[entry.pools].tolist(), entry.epochs[entry.pools].tolist()
        vector_by_row = {pooled.owner: pooled.vector for pooled in output.pooled}
        if vector_by_row.keys() != set(rows):
            raise ProtocolError(f"step {entry.step}: {len(vector_by_row)} rows were embedded, {len(rows)} had to be")
        live = [row for row, epoch in zip(rows, epochs, strict=True) if self._rows.epoch[row] == epoch]
        return [FinishedRequest(self._finish(row), "stop", vector_by_row[row]) for row in live]

    def _finish_stopped(self, rows: Ids, token_ids: Ids) -> list[FinishedRequest]:
        """token_ids: the last of each row, just appended."""
        has_stopped = self._rows.stopped(rows, token_ids)
        is_full = self._rows.num_tokens[rows] >= self._rows.token_limit[rows]
        return [
            FinishedRequest(self._finish(int(rows[i])), "stop" if has_stopped[i] else "length")
            for i in np.flatnonzero(has_stopped | is_full).tolist()
        ]

    def _finish(self, row: int) -> Request:
        request = self._rows.request(row)
        self._release(request)
        request.move(State.FINISHED)
        return request
