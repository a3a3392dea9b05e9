"""The steps of a self-check: rows of tokens cut into chunks, which are packed together and scattered over KV blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..machine.arrays import I32
from ..step.step_inputs import GroupInputs, StepInputs
from .reduced_config import WINDOW

BLOCK_SIZE = 4
LENGTHS = (4 * WINDOW + 3, 2 * WINDOW + 1, 5)  # tokens of each row
# The number of tokens of each row in each step. They mix new chunks, continued chunks and single tokens.
STEPS = ((7, 0, 0), (9, 2 * WINDOW - 1, 0), (1, 1, 3), (8, 1, 1), (1, 0, 1), (1, 0, 0))
NUM_BLOCKS = 1 + sum(-(-length // BLOCK_SIZE) for length in LENGTHS)


@dataclass(frozen=True)
class Span:
    """Tokens of one row in a step: those at positions [start, stop). The first of them is token `first` of the step."""

    row: int
    start: int
    stop: int
    first: int

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.stop - self.start)


def packed_steps(tokens: Sequence[I32]) -> Iterator[tuple[StepInputs, list[Span]]]:
    """Yield, for each step, its inputs and its spans. tokens: the token ids of each row, LENGTHS of them. All tokens of
    a step get logits."""
    blocks = _blocks()
    computed = [0] * len(tokens)
    for counts in STEPS:
        order = sorted((row for row, count in enumerate(counts) if count), key=lambda row: counts[row] != 1)
        starts = np.cumsum([0, *(counts[row] for row in order)]).astype(np.int32)
        spans = [
            Span(row, computed[row], computed[row] + counts[row], int(first))
            for row, first in zip(order, starts, strict=False)
        ]
        for span in spans:
            computed[span.row] = span.stop
        yield _inputs(spans, starts, tokens, blocks), spans


def _blocks() -> list[I32]:
    """Return the block ids of each row, in falling order, so that slots do not follow the positions."""
    ids = np.arange(NUM_BLOCKS - 1, 0, -1, dtype=np.int32)
    return np.split(ids, np.cumsum([-(-length // BLOCK_SIZE) for length in LENGTHS])[:-1])


def _inputs(spans: list[Span], starts: I32, tokens: Sequence[I32], blocks: list[I32]) -> StepInputs:
    positions = [np.arange(span.start, span.stop) for span in spans]
    slots = [
        blocks[span.row][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for span, at in zip(spans, positions, strict=True)
    ]
    widest = max(len(blocks[span.row]) for span in spans)
    tables = np.stack([np.pad(blocks[span.row], (0, widest - len(blocks[span.row]))) for span in spans])
    rows = np.array([span.row for span in spans], np.int32)
    stops = np.array([span.stop for span in spans], np.int64)
    return StepInputs(
        rows=rows,
        token_ids=np.concatenate([tokens[span.row][span.start : span.stop] for span in spans]),
        positions=np.concatenate(positions),
        query_starts=starts,
        seq_lens=stops.astype(np.int32),
        groups=[GroupInputs(np.concatenate(slots).astype(np.int64), tables)],
        num_decode_rows=sum(span.stop - span.start == 1 for span in spans),
        sampled_rows=rows,
        sampled_positions=stops,
        sampled_tokens=np.arange(starts[-1], dtype=np.int64),
    )
