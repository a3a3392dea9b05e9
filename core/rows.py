"""The running requests in columns: one row each, from admission to finish or preemption.

What every step touches is numpy here, so that a step costs the same Python for 1 row as for 256. Terms:

    num_tokens     known tokens: prompt and the outputs whose results are back
    num_scheduled  tokens whose computation has been sent, including steps in flight
    token_limit    most tokens it may have; the last of them is never computed

A row that has computed all known tokens samples one per step; the sample may still be in flight when the next step is
scheduled, hence a row can always take max(num_tokens - num_scheduled, 1) tokens, up to its limit. A row to embed
samples nothing, and its limit is one token past its prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .request import Ids, Request

_STOP_COLUMNS = 8  # stop ids compared for all rows at once; rows with more are compared one by one


class Rows:
    """Column arrays of length max_num_seqs. `epoch[row]` changes whenever the row changes hands."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        def column(dtype: type = np.int32) -> npt.NDArray[np.int32]:
            return np.zeros(max_num_seqs, dtype)

        self.block_size = block_size
        self.tokens: Ids = np.zeros((max_num_seqs, max_model_len), np.int32)  # pages are touched as they fill
        self.is_active: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.epoch = column()
        self.num_tokens = column()
        self.num_prompt_tokens = column()
        self.num_scheduled = column()
        self.num_slots = column()  # block_size × blocks in its table
        self.num_published = column()  # blocks of its table in the index
        self.token_limit = column()
        self.min_tokens_end = column()  # no stop by token below this many tokens
        self.scores_prompt: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)  # logprobs of it are wanted
        self.grammar_id = column()  # 0: none
        self.is_pooled: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.owner = column()
        self.key = column()
        self.order: npt.NDArray[np.float64] = np.zeros(max_num_seqs, np.float64)
        self.stop_ids: Ids = np.full((max_num_seqs, _STOP_COLUMNS), -1, np.int32)
        self.request_by_row: list[Request | None] = [None] * max_num_seqs
        self._extra_stop_ids: dict[int, frozenset[int]] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_active(self) -> int:
        return len(self.request_by_row) - len(self._free)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def requests(self) -> list[Request]:
        return [request for request in self.request_by_row if request is not None]

    def request(self, row: int) -> Request:
        request = self.request_by_row[row]
        assert request is not None, f"row {row} is free"
        return request

    def occupy(self, request: Request, num_computed_tokens: int) -> int:
        """Move a request's state into a free row; returns the row."""
        row = self._free.pop()
        count = request.num_tokens
        self.tokens[row, :count] = request.tokens[:count]
        request.tokens, request.row = self.tokens[row], row
        self.request_by_row[row] = request
        self.is_active[row] = True
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_scheduled[row] = num_computed_tokens
        self.num_slots[row] = len(request.block_ids) * self.block_size
        self.num_published[row] = request.num_published
        self.token_limit[row] = request.token_limit
        self.min_tokens_end[row] = request.num_prompt_tokens + request.params.min_tokens
        self.scores_prompt[row] = request.num_prompt_logprobs < request.num_prompt_tokens
        self.grammar_id[row] = request.grammar_id
        self.is_pooled[row] = request.pooling is not None
        self.owner[row], self.key[row], self.order[row] = request.owner, request.key, request.order
        self._set_stop_ids(row, request.stop_token_ids)
        return row

    def vacate(self, row: int) -> Request:
        """Take the request off its row, with a copy of its tokens; results in flight for the row become stale."""
        request = self.request(row)
        request.num_tokens = int(self.num_tokens[row])
        request.tokens = self.tokens[row, : request.num_tokens].copy()
        request.row = -1
        self.request_by_row[row] = None
        self.is_active[row] = False
        self.epoch[row] += 1
        self._extra_stop_ids.pop(row, None)
        self._free.append(row)
        return request

    def _set_stop_ids(self, row: int, stop_ids: list[int]) -> None:
        self.stop_ids[row] = -1
        if len(stop_ids) <= _STOP_COLUMNS:
            self.stop_ids[row, : len(stop_ids)] = stop_ids
        else:
            self._extra_stop_ids[row] = frozenset(stop_ids)

    def schedulable(self) -> npt.NDArray[np.int32]:
        """[max_num_seqs]: how many tokens each row could compute in the next step; 0 for free rows."""
        ahead = np.maximum(self.num_tokens - self.num_scheduled, 1)
        count: Ids = np.minimum(ahead, self.token_limit - 1 - self.num_scheduled)
        count[~self.is_active] = 0
        return count

    def append(self, rows: Ids, token_ids: Ids) -> None:
        """One more known token on each of `rows`."""
        ends = self.num_tokens[rows]
        self.tokens[rows, ends] = token_ids
        self.num_tokens[rows] = ends + 1

    def extend(self, row: int, token_ids: list[int]) -> None:
        """More known tokens on one row."""
        end = int(self.num_tokens[row])
        self.tokens[row, end : end + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def stopped(self, rows: Ids, token_ids: Ids) -> npt.NDArray[np.bool_]:
        """[n]: whether the last token of each row, just appended, is one of its stop ids and may stop it."""
        hit: npt.NDArray[np.bool_]
        hit = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        if self._extra_stop_ids:
            for i, row in enumerate(rows.tolist()):
                if row in self._extra_stop_ids:
                    hit[i] = int(token_ids[i]) in self._extra_stop_ids[row]
        hit &= self.num_tokens[rows] >= self.min_tokens_end[rows]
        return hit
