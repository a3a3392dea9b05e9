"""ClipRows: the audio clips with which rows begin, for a model with cross attention, and their part in a step.

    tokens of a row   │ clip: encoder rows, then padding up to a whole block │ decoder tokens │
    its block table   │ keys and values of cross attention                   │ of attention   │

The tokens of a clip pass through no decoder layer: to compute them means to write the keys and values of encoder rows
to their slots. So a step is split: the decoder gets only its own tokens, the rest of each block table, and lengths
without the clip.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....ipc.errors import ProtocolError
from ....ipc.messages.workers import NewRow
from ....ipc.spec.models.model_config import CrossConfig
from ...machine.arrays import I32, I64, Bools
from ...step.step_inputs import GroupInputs, StepInputs
from .media_rows import Piece
from .row_spans import FIELDS


class ClipStep(NamedTuple):
    """A step of rows with clips, split into the decoder's part and the part of the clips."""

    decoder: StepInputs  # T tokens of n rows; their positions, and those of the tokens they sample, count the clip
    positions: I64  # [T] of the decoder's tokens, without the clip
    clip_tables: I32  # [n, blocks of a clip]
    pieces: tuple[Piece, ...]  # encoder rows of entry 0 are zeros: padding
    slots: I64  # of the encoder rows, in the order of the pieces


class ClipRows:
    """Owner of the entry of each row's clip. `num_rows`: encoder rows of a clip. `num_tokens`: tokens that stand for a
    clip in a request, padding included."""

    def __init__(self, max_num_seqs: int, cross: CrossConfig, block_size: int) -> None:
        assert cross.num_tokens % block_size == 0, "no block holds tokens of both kinds"
        self.num_rows, self.num_tokens = cross.num_rows, cross.num_tokens
        self.max_num_seqs, self._num_blocks = max_num_seqs, cross.num_tokens // block_size
        self._entries: I32 = np.zeros(max_num_seqs, np.int32)  # 0: not bound

    def admit(self, new_row: NewRow) -> None:
        """Reset the entry of a new row. ProtocolError unless its tokens are a clip and at least one token after it."""
        span, num_tokens = np.frombuffer(new_row.spans, np.int32).tolist(), len(new_row.token_ids) // 4
        if len(span) != FIELDS or span[:2] != [0, self.num_tokens] or num_tokens <= self.num_tokens:
            raise ProtocolError(
                f"row {new_row.row} of {num_tokens} tokens is admitted with the spans {span}: it must begin with a "
                f"clip of {self.num_tokens} tokens, and have others"
            )
        self._entries[new_row.row] = 0

    def free(self, rows: I32) -> None:
        self._entries[rows] = 0

    def clear(self) -> None:
        self._entries[:] = 0

    def bind(self, bindings: I32) -> None:
        """Bind clips to entries. bindings: [m, 3] row, index of the span, entry. ProtocolError unless the index is 0
        and the entry at least 1."""
        for row, index, entry in bindings.tolist():
            if index or entry < 1:
                raise ProtocolError(f"entry {entry} is bound to span {index} of row {row}, which has a clip alone")
            self._entries[row] = entry

    def split(self, inputs: StepInputs) -> ClipStep:
        """Split the inputs of a step. ProtocolError if it computes tokens of a clip without an entry."""
        firsts = inputs.positions[inputs.query_starts[:-1]]
        if (firsts >= self.num_tokens).all():
            return self._with_clips(inputs, (), _group_of(inputs).slots[:0])
        is_clip = inputs.positions < self.num_tokens
        pieces: list[Piece] = []
        ends = np.minimum(inputs.seq_lens, self.num_tokens)
        for i in np.flatnonzero(firsts < self.num_tokens).tolist():
            pieces += self._pieces(int(inputs.rows[i]), int(firsts[i]), int(ends[i]))
        return self._with_clips(_without(inputs, is_clip), tuple(pieces), _group_of(inputs).slots[is_clip])

    def _pieces(self, row: int, first: int, end: int) -> list[Piece]:
        """Return the encoder rows of the tokens [first, end) of a row's clip."""
        entry, real_end = int(self._entries[row]), min(end, self.num_rows)
        if not entry:
            raise ProtocolError(f"row {row} computes tokens of its clip, which has no entry yet")
        pieces = [Piece(entry, first, real_end - first)] if first < real_end else []
        num_padding = end - max(first, self.num_rows)
        return [*pieces, Piece(0, 0, num_padding)] if num_padding > 0 else pieces

    def _with_clips(self, decoder: StepInputs, pieces: tuple[Piece, ...], slots: I64) -> ClipStep:
        """Return the split step. decoder: the inputs of the decoder's tokens, with block tables, lengths and positions
        that still include the clips."""
        group = _group_of(decoder)
        clip_tables, tables = np.split(group.block_tables, [self._num_blocks], axis=1)
        own = decoder._replace(
            seq_lens=decoder.seq_lens - self.num_tokens, groups=[group._replace(block_tables=tables)]
        )
        return ClipStep(own, decoder.positions - self.num_tokens, clip_tables, pieces, slots)


def _group_of(inputs: StepInputs) -> GroupInputs:
    """Return the only KV group: tokens of clips and of the decoder share their block tables."""
    (group,) = inputs.groups
    return group


def _without(inputs: StepInputs, is_clip: Bools) -> StepInputs:
    """Return the inputs without these tokens [T], and without the rows that have no others."""
    before = np.concatenate([[0], np.cumsum(~is_clip)])  # tokens of the decoder before each
    starts = before[inputs.query_starts].astype(np.int32)
    counts = np.diff(starts)
    stays = counts > 0
    group = _group_of(inputs)
    return inputs._replace(
        rows=inputs.rows[stays],
        token_ids=inputs.token_ids[~is_clip],
        positions=inputs.positions[~is_clip],
        query_starts=np.concatenate([starts[:1], np.cumsum(counts[stays], dtype=np.int32)]),
        seq_lens=inputs.seq_lens[stays],
        groups=[GroupInputs(group.slots[~is_clip], group.block_tables[stays])],
        num_decode_rows=int(np.count_nonzero(stays[: inputs.num_decode_rows])),
        sampled_tokens=before[inputs.sampled_tokens],
    )
