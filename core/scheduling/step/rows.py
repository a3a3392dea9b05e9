"""Rows: the running requests as columns: each has a row from its admission until it is finished or preempted.

Per-step state is in numpy columns, so that a step needs as many Python calls for 1 row as for 256. Terms:

    num_tokens     number of known tokens: the prompt and the outputs returned so far
    num_scheduled  number of tokens that workers were sent to compute, including those of steps in flight
    token_limit    largest number of tokens; the last of them is only sampled, never computed

A row that has computed all its known tokens samples one token in each step. That token may still be in flight when the
next step is scheduled, so a row can always compute max(num_tokens - num_scheduled, 1) tokens, up to its limit. A row to
embed samples nothing; its limit is one token more than its prompt.

A row with drafts computes them after its last known token. They count in num_scheduled until the result shows which of
them are accepted. Until then the row is in no other step.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from ....ipc.spec.config.speculation import MAX_DRAFTS
from ...request import Ids, Request, State


class Rows:
    """Columns of length max_num_seqs, with an entry for each row. `epoch[row]` changes when the row's request leaves
    and when what steps in flight sample for it is void; `version` changes when a request gets or leaves a row, when a
    row gets more or less than one token in a step, and when it begins or ends to need masks."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, *, have_states: bool = False) -> None:
        """have_states: rows have a state, which a step with drafts does not update."""

        def column(dtype: type = np.int32) -> npt.NDArray[np.int32]:
            return np.zeros(max_num_seqs, dtype)

        self.block_size = block_size
        self.have_states = have_states
        self.most_left = MAX_DRAFTS if have_states else 1  # tokens before a row's drafts in a step
        self.most_late = 2 * MAX_DRAFTS + 1 if have_states else 1  # tokens that a row computes again after drafts
        self.tokens: Ids = np.zeros((max_num_seqs, max_model_len), np.int32)  # takes memory only as rows fill
        self.flat_tokens = self.tokens.reshape(-1)
        self._first_place = np.arange(max_num_seqs) * max_model_len  # index in flat_tokens of each row's first token
        self.version = 0
        self.num_active = 0
        self.num_flex = 0  # active rows of the flex class
        self.is_active: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.epoch = column()
        self.num_tokens = column()
        self.num_prompt_tokens = column()
        self.num_scheduled = column()
        self.num_rewound = column()  # number of calls of `rewind` for the row, over all its requests
        self.num_drafts = column()  # drafts in flight
        self.num_withheld = column()  # tokens in flight that do not update the row's state: it computes them again
        self.num_cached_blocks = column()  # blocks of the row that other requests can find by their keys
        self.token_limit = column()
        self.scores_prompt: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)  # prompt logprobs due
        self.grammar_id = column()  # 0: none
        self.is_masked: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)  # the next token needs a mask
        self.is_pooled: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.tenant = column()  # index of the request's tenant
        self.frontend_id = column()
        self.request_key = column()
        self.sort_key: npt.NDArray[np.float64] = np.full(max_num_seqs, -np.inf)
        self.num_rows_by_stop_id: Counter[int] = Counter()  # by stop id: number of rows that have it, if any
        self.request_by_row: list[Request | None] = [None] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def requests(self) -> list[Request]:
        return [request for request in self.request_by_row if request is not None]

    def request(self, row: int) -> Request:
        request = self.request_by_row[row]
        assert request is not None, f"row {row} is free"
        return request

    def known_tokens(self) -> dict[Request, int]:
        """Return the number of known tokens of each running request."""
        return {request: self.num_known(request) for request in self.requests()}

    def known_tokens_of(self, rows: npt.NDArray[np.integer], epochs: npt.NDArray[np.integer]) -> dict[Request, int]:
        """Return the number of known tokens of the requests in `rows`, except those that have left: their rows have
        other epochs than `epochs`."""
        return {self.request(row): int(self.num_tokens[row]) for row in rows[self.epoch[rows] == epochs].tolist()}

    def num_known(self, request: Request) -> int:
        """Return the number of known tokens of a running or waiting request."""
        return int(self.num_tokens[request.row]) if request.row >= 0 else request.num_tokens

    def output_tokens(self, request: Request) -> Ids:
        """Return the output tokens so far of a running or waiting request."""
        return request.tokens[request.num_prompt_tokens : self.num_known(request)]

    def occupy(self, request: Request, num_computed_tokens: int) -> int:
        """Move a request into a free row; return the row. num_computed_tokens: number of tokens that its blocks already
        hold."""
        row = self._free.pop()
        count = request.num_tokens
        self.tokens[row, :count] = request.tokens
        request.tokens, request.row = self.tokens[row], row
        self.request_by_row[row] = request
        self.is_active[row] = True
        self.num_active += 1
        self.num_flex += request.is_flex
        self.version += 1
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_scheduled[row] = num_computed_tokens
        self.num_drafts[row] = self.num_withheld[row] = 0
        self.num_cached_blocks[row] = request.num_cached_blocks
        self.token_limit[row] = request.token_limit
        self.scores_prompt[row] = request.num_prompt_logprobs < request.num_prompt_tokens
        self.grammar_id[row] = request.grammar_id
        self.is_masked[row] = request.is_masked
        self.is_pooled[row] = request.pooling is not None
        self.tenant[row] = request.tenant.index
        self.frontend_id[row], self.request_key[row] = request.frontend_id, request.key
        self.sort_key[row] = request.sort_key
        self.num_rows_by_stop_id.update(request.stop_token_ids)
        return row

    def vacate(self, row: int) -> None:
        """Remove the request from its row and give it a copy of its tokens. Results in flight for the row become
        void."""
        request = self.request(row)
        request.num_tokens = int(self.num_tokens[row])
        request.tokens = self.tokens[row, : request.num_tokens].copy()
        request.row = -1
        self.request_by_row[row] = None
        self.is_active[row], self.sort_key[row] = False, -np.inf
        self.epoch[row] += 1
        self.num_active -= 1
        self.num_flex -= request.is_flex
        self.version += 1
        self.num_rows_by_stop_id.subtract(request.stop_token_ids)
        for token_id in request.stop_token_ids:
            if not self.num_rows_by_stop_id[token_id]:
                del self.num_rows_by_stop_id[token_id]
        self._free.append(row)

    def void_samples(self, row: int) -> None:
        """Make the last known token of a row the next to compute, and the results in flight of the row void."""
        request = self.request(row)
        request.num_tokens = int(self.num_tokens[row])  # as if it were admitted now
        self.num_scheduled[row] = request.num_tokens - 1
        self.num_drafts[row] = 0
        self.epoch[row] += 1
        self.version += 1

    def in_order(self, rows: npt.NDArray[np.integer]) -> list[int]:
        """Return `rows` [n] in the policy's order."""
        in_order: list[int] = rows[np.argsort(self.sort_key[rows], kind="stable")].tolist()
        return in_order

    def first_token(self, row: int) -> int:
        """Return the first token of a row that may be computed in a step that is not sent yet: the next one, or its
        last known token if it is rewound, or if its drafts in flight are wrong; with a state, the first of those in
        flight with drafts."""
        return min(int(self.num_scheduled[row] - self.num_withheld[row]), int(self.num_tokens[row]) - 1)

    def num_written(self, rows: npt.NDArray[np.integer]) -> Ids:
        """Return how many known tokens of `rows` [n] the sent steps compute for good: [n]."""
        count: Ids = np.minimum(self.num_scheduled[rows] - self.num_withheld[rows], self.num_tokens[rows])
        return count

    def schedulable(self) -> npt.NDArray[np.int32]:
        """Return how many tokens each row could compute in the next step: [max_num_seqs]; 0 for free rows and rows with
        drafts in flight."""
        ahead = np.maximum(self.num_tokens - self.num_scheduled, 1)
        count: Ids = np.minimum(ahead, self.token_limit - 1 - self.num_scheduled)
        count[~self.is_active | (self.num_drafts > 0)] = 0
        return count

    def take_late(self, ahead: Ids) -> Ids:
        """Take the rows out of `ahead`, the result of `schedulable`, that compute the tokens before their drafts again;
        return theirs."""
        is_late = (ahead > 1) & (ahead <= self.most_late)
        late: Ids = np.where(is_late, ahead, 0)
        ahead[is_late] = 0
        return late

    def draftable(self) -> npt.NDArray[np.int32]:
        """Return how many drafts each row may have in the next step: [max_num_seqs]. 0 unless the row's last token is a
        known output and the only token left to compute. A row with a state, which computes the tokens of a step with
        drafts again, may have up to MAX_DRAFTS tokens left. The limit leaves room for the token sampled after the
        drafts."""
        num_left = self.num_tokens - self.num_scheduled
        is_ready = self.is_active & (num_left >= 1) & (num_left <= self.most_left) & ~self.is_pooled
        is_ready &= self.num_tokens > self.num_prompt_tokens
        count: Ids = np.where(is_ready, self.token_limit - 1 - self.num_tokens, 0)
        return count

    def places(self, rows: npt.NDArray[np.integer], positions: Ids) -> npt.NDArray[np.intp]:
        """Return the indices in flat_tokens, for `append`, of the tokens at `positions` [n] of `rows` [n]."""
        places: npt.NDArray[np.intp] = self._first_place[rows] + positions
        return places

    def append(self, places: npt.NDArray[np.intp], token_ids: Ids, counts: npt.NDArray[np.integer]) -> None:
        """Append tokens that are now known: token_ids[i] goes to `places[i]`. counts: [max_num_seqs] number of new
        tokens of each row."""
        self.flat_tokens[places] = token_ids  # indexing by row and position would take twice as long
        self.num_tokens += counts

    def rewind(self, rows: npt.NDArray[np.integer]) -> None:
        """Make each of `rows` compute its last token again. Its results in flight then apply one position earlier."""
        self.num_scheduled[rows] -= 1
        self.num_rewound[rows] += 1

    def settle_drafts(self, rows: npt.NDArray[np.integer], num_tokens: Ids) -> None:
        """Record that the drafts in flight of `rows` [n] were verified and gave `num_tokens` [n] tokens: the accepted
        drafts, and a sampled token that is still to be computed. 0 tokens count as 1; call `rewind` for such rows. Rows
        with a state compute all tokens of the step again."""
        num_taken_back = self.num_drafts[rows] + 1 - np.maximum(num_tokens, 1)
        self.num_scheduled[rows] -= np.where(self.num_withheld[rows] > 0, self.num_withheld[rows], num_taken_back)
        self.num_drafts[rows] = self.num_withheld[rows] = 0

    def is_stop(self, row: int, position: int, token_id: int) -> bool:
        """Return whether `token_id`, the token at `position`, is one of the row's stop ids and min_tokens is
        reached."""
        request = self.request(row)
        num_outputs = position + 1 - request.num_prompt_tokens
        return token_id in request.stop_token_ids and num_outputs >= request.params.min_tokens

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self) -> None:
        """Raise AssertionError unless the columns agree with the running requests and, if they hold blocks, their
        tables."""
        size = self.block_size
        for request in self.requests():
            row = request.row
            assert request.state is State.RUNNING and self.is_active[row]
            num_sent = self.num_scheduled[row]
            num_spare = request.num_blocks - -(-num_sent // size)
            most_drafts = MAX_DRAFTS if self.most_left == 1 else 2 * MAX_DRAFTS + 1  # with known tokens before them
            if request.num_blocks:
                assert 0 <= num_spare <= 2 - (-most_drafts // size), "blocks of drafts and rewound tokens"
            assert self.num_drafts[row] in (0, num_sent - self.num_tokens[row]), "drafts follow the last known token"
            assert self.num_tokens[row] < self.token_limit[row], "a full row must have finished"
            assert num_sent < self.token_limit[row], "the last token is never computed"
            assert request.num_cached_blocks * size <= self.num_tokens[row], "an unknown token was published"
        assert self.num_flex == sum(request.is_flex for request in self.requests())
