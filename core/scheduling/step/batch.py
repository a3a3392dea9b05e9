"""Batch: the rows of one step, kept while the same rows decode step after step.

If every running row samples in a step, the next step computes the same rows, each one token further, until a row is
added, leaves or reaches its limit. All these steps share one Batch: making one takes 126 µs for 256 rows and 96 µs for
8, five times as long as the rest of scheduling a decode step. Any other step has a Batch of its own. Knows no queue and
no pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt

from ....ipc.codec import encode_ids
from ...request import Ids
from .rows import Rows


class TokenOwners:
    """The requests that output tokens belong to, as columns with an entry for each token. A request may appear more
    than once."""

    def __init__(self, state: Rows, rows: npt.NDArray[np.integer]) -> None:
        self.frontend_ids, keys = state.frontend_id[rows], state.request_key[rows]
        self.num_prompt_tokens = state.num_prompt_tokens[rows]
        self.grammar_ids = state.grammar_id[rows]  # 0: no grammar
        self.has_grammar = bool(self.grammar_ids.any())
        is_one = len(rows) and (self.frontend_ids == self.frontend_ids[0]).all()
        self.frontend_id = int(self.frontend_ids[0]) if is_one else None  # None: several
        self.keys, self.counts = keys.tobytes(), encode_ids([1]) * len(rows)  # int32


class Batch:
    """The rows of a step, in ascending order, and of up to `num_steps` - 1 following steps, which end early if
    `state.version` changes. After step i of the batch, counted from 0, the first `ends + i` tokens of each row are
    computed, and after these its drafts. A step without rows, which only has orders (copies of blocks, fills,
    encodes), has a batch without rows."""

    def __init__(
        self, state: Rows, rows: npt.NDArray[np.intp], counts: Ids, drafts: Mapping[int, list[int]] | None = None
    ) -> None:
        """counts: [n] number of tokens that the first step computes for each of `rows` [n], including its drafts.
        drafts: token ids of the drafts, by row."""
        self.drafts: Mapping[int, list[int]] = drafts or {}
        num_all = counts
        if self.drafts:
            self.num_drafts: Ids = np.array([len(self.drafts.get(row, ())) for row in rows.tolist()], np.int32)
            counts = counts - self.num_drafts
        ends = state.num_scheduled[rows] + counts
        is_end, is_pooled = ends >= state.num_tokens[rows], state.is_pooled[rows]
        prompts = state.num_prompt_tokens[rows]
        is_prompt = ends - counts < prompts
        samples = is_end & ~is_pooled
        self.version = state.version
        # A batch is read at three steps at once: `num_sent` is the number of the one that is scheduled next; the one in
        # flight and the older one, whose result is applied, keep theirs in ledger entries. While rows only decode:
        #     step                       0          1          2
        #     computes a row up to       ends       ends + 1   ends + 2   tokens
        #     samples the token at       ends       ends + 1   ends + 2   (from 0, the first prompt token)
        # A rewind between the batch and a result puts that row's token one place back: see `sampled_rewound`.
        self.num_sent = 0  # steps
        self.rows, self.ends, self.counts, self.epochs = rows, ends, counts, state.epoch[rows]
        self.row_frame, self.count_frame = rows.astype(np.int32).tobytes(), num_all.tobytes()
        self.num_tokens = int(num_all.sum())  # computed by the first step, all rows together
        self.num_prompt_tokens = int(counts[counts > 1].sum())  # of num_tokens: those in chunks of more than one token
        is_first = state.num_tokens[rows] == prompts  # without output tokens, which a preempted or resumed request has
        self.num_prefilled_tokens = int(prompts[is_prompt & is_first & is_end].sum())  # of prompts that it completes
        self.scores_prompts = bool((state.scores_prompt[rows] & is_prompt).any())  # the step returns prompt logprobs
        self.pooled_rows = rows[is_end & is_pooled]  # rows to embed whose prompts are complete after the step
        self.pooled_epochs = self.epochs[is_end & is_pooled]
        self.sampled_rows, self.sampled_ends = rows[samples], ends[samples]
        self.sampled_places = state.places(self.sampled_rows, self.sampled_ends)  # of the tokens that step 0 samples
        self.sampled_epochs, self.sampled_rewound = self.epochs[samples], state.num_rewound[self.sampled_rows]
        self.sampled_frame = self.sampled_rows.astype(np.int32).tobytes()
        self.sampled_counts: Ids = np.zeros_like(state.num_tokens)  # [max_num_seqs] tokens sampled by row: 1 or 0
        self.sampled_counts[self.sampled_rows] = 1
        self.num_steps = 1
        is_plain = not self.scores_prompts and not self.num_prefilled_tokens
        if len(rows) and is_plain and samples.all() and self.num_tokens == len(rows) == state.num_active:
            self.num_steps = int((state.token_limit[rows] - ends).min())
        self.token_owners = TokenOwners(state, self.sampled_rows)
        grammar_ids = self.token_owners.grammar_ids
        self.draft_frame = encode_ids(chain.from_iterable((row, len(ids), *ids) for row, ids in self.drafts.items()))
        self.grammar_ids: list[int] = []  # of the rows whose next token needs a mask
        if self.token_owners.has_grammar:
            self.grammar_ids = grammar_ids[(grammar_ids > 0) & state.is_masked[self.sampled_rows]].tolist()
        self._block_size = state.block_size
        # for each row: the number of the steps, modulo the block size, that compute the first token of a block
        self._block_end_by_row = (1 - ends) % state.block_size
        self._block_ends = frozenset(self._block_end_by_row.tolist())

    def repeats(self, state: Rows) -> bool:
        """Return whether the next step may be another step of this batch."""
        return self.version == state.version and self.num_sent < self.num_steps

    def rows_at_block_end(self) -> npt.NDArray[np.intp] | None:
        """Return the rows whose token in the batch's next step is the first of a block; None if there are none. In most
        steps there are none, which a set lookup shows in 0.2 µs; comparing 256 rows takes 5 µs."""
        step = self.num_sent % self._block_size
        return self.rows[self._block_end_by_row == step] if step in self._block_ends else None
