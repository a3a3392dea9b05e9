"""Batch: the rows of one step, and what does not change of them while the same rows decode, step after step.

A step of which every running row samples is followed by one of the same rows, each a token further, until a row comes,
goes or is at its end. Such steps share one Batch; any other step has one of its own. Knows no queue and no pool.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...ipc.codec import encode_ids
from ..request import Ids
from .rows import Rows


class Labels:
    """Whose tokens they are: columns of equal length, one entry per token; entries may repeat."""

    def __init__(self, state: Rows, rows: Ids) -> None:
        self.owners, self.keys = state.owner[rows], state.key[rows]
        self.num_prompt_tokens = state.num_prompt_tokens[rows]
        self.grammar_ids = state.grammar_id[rows]  # 0: no grammar
        self.has_grammar = bool(self.grammar_ids.any())
        self.owner = int(self.owners[0]) if len(rows) and (self.owners == self.owners[0]).all() else None  # of all
        self.key_frame, self.count_frame = self.keys.tobytes(), encode_ids([1]) * len(rows)


class Batch:
    """Invariant: a batch serves `num_steps` steps at most, and none after `state.version` has changed. Its rows are
    ascending; in its step i (0 is the first) each ends i tokens after `ends`."""

    def __init__(self, state: Rows, rows: Ids, counts: Ids) -> None:
        """counts: how many tokens the first step computes of each row."""
        ends = state.num_scheduled[rows] + counts
        is_end, is_pooled = ends >= state.num_tokens[rows], state.is_pooled[rows]
        is_prompt = ends - counts < state.num_prompt_tokens[rows]
        samples = is_end & ~is_pooled
        self.version = state.version
        self.num_sent = 0  # steps
        self.rows, self.ends, self.epochs = rows, ends, state.epoch[rows]
        self.row_frame, self.count_frame = rows.tobytes(), counts.tobytes()
        self.num_tokens = int(counts.sum())  # that its first step computes, all rows together
        self.num_prompt_tokens = int(counts[counts > 1].sum())  # of them, in chunks of more than one token
        self.scores_prompts = bool((state.scores_prompt[rows] & is_prompt).any())  # whether logprobs of them are told
        self.pools = is_end & is_pooled  # which rows to embed are computed to their end
        self.has_pooled = bool(self.pools.any())
        self.samples: npt.NDArray[np.bool_] = samples  # which rows' last known token is computed, but for those
        self.num_steps, does_repeat = 1, bool(samples.all())
        self.sampling_rows, self.sampling_ends, self.sampling_frame = rows, ends, self.row_frame
        if not does_repeat:
            self.sampling_rows, self.sampling_ends = rows[samples], ends[samples]
            self.sampling_frame = self.sampling_rows.tobytes()
        elif self.num_tokens == len(rows) == state.num_active and not self.scores_prompts:
            self.num_steps = int((state.token_limit[rows] - ends).min())
        self.labels = Labels(state, self.sampling_rows)
        starts = self.sampling_ends - self.labels.num_prompt_tokens
        # A column in one integer: 32 bits are a row, and one addition goes through all of them.
        self._starts, self._ones = _integer(starts.tobytes()), _integer(self.labels.count_frame)
        grammar_ids = self.labels.grammar_ids
        self.grammar_ids: list[int] = grammar_ids[grammar_ids > 0].tolist() if self.labels.has_grammar else []
        self._block_size = state.block_size
        self._phases: Ids | None = None  # of each row: the steps, modulo the block size, that begin a block
        self._phase_set: frozenset[int] = frozenset()

    def start_frame(self, number: int) -> bytes:
        """int32, of each row that samples: the output index of the token that step `number` of the batch brings."""
        return (self._starts + number * self._ones).to_bytes(len(self.labels.count_frame), "little")

    def repeats(self, state: Rows) -> bool:
        """Whether the next step may be one of this batch."""
        return self.version == state.version and self.num_sent < self.num_steps

    def rows_at_block_end(self) -> Ids | None:
        """Those whose next token is the first of a block, if there are any."""
        if self._phases is None:
            self._phases = (1 - self.ends) % self._block_size
            self._phase_set = frozenset(self._phases.tolist())
        phase = self.num_sent % self._block_size
        return self.rows[self._phases == phase] if phase in self._phase_set else None


def _integer(frame: bytes) -> int:
    return int.from_bytes(frame, "little")
