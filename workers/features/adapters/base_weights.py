"""BaseWeights: rows of the base model's matrices, for the norms by which DoRA divides (arXiv 2402.09353).

The rows have the values with which the model computes. They are read from the checkpoint, because a rank holds only a
shard, in the layout of the kernels. They are read in pieces, so that a large matrix takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ....ipc.errors import ConfigError, RequestError
from ....kernels.quantized import as_floats
from ...weights.adapted_layers import AdaptedPart, Outputs
from ...weights.checkpoint import Checkpoint
from ...weights.dummy import DummyCheckpoint
from ...weights.quantized_weights import load_matrix

PIECE_BYTES = 16 << 20  # of rows in float32


class BaseWeights:
    """Reader of base weights, used as a context manager. It opens the checkpoint when it first needs it."""

    def __init__(self, open_checkpoint: Callable[[], Checkpoint], piece_bytes: int = PIECE_BYTES) -> None:
        """The checkpoint must be on the CPU, in the model's dtype and with its quantization."""
        self._open, self._piece_bytes = open_checkpoint, piece_bytes

    def __enter__(self) -> BaseWeights:
        return self

    def __exit__(self, *error: object) -> None:
        if "_checkpoint" in self.__dict__:
            self._checkpoint.__exit__()

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self._open()

    def norms(self, part: AdaptedPart, a: Tensor, b: Tensor) -> Tensor:
        """Compute the Euclidean norm of each row of W + b @ a, for the part's outputs: [n] float32. a: [rank, in] of
        all inputs; b: [n, rank]. RequestError if the checkpoint lacks the rows."""
        lengths = torch.empty(len(b))
        for places in self._pieces(len(b), part.weight.shape[1]):
            rows = self._rows(part, part.outputs[places.start : places.stop])
            rows += b[places.start : places.stop] @ a
            lengths[places.start : places.stop] = torch.linalg.vector_norm(rows, dim=1)
        return lengths

    def holds(self, part: AdaptedPart, ids: range, matrix: Tensor) -> bool:
        """Return whether the rows `ids` of `matrix` [all ids, hidden] equal those of the part's weight, in the dtype of
        `matrix`; True for dummy weights."""
        checkpoint = self._checkpoint
        if isinstance(checkpoint, DummyCheckpoint):
            return True
        for places in self._pieces(min(ids.stop, len(matrix)) - ids.start, matrix.shape[1]):
            rows = ids[places.start : places.stop]
            stored = checkpoint.load(replace(part.weight, axis=0, shard=rows), dtype=torch.float32)
            if not torch.equal(stored.to(matrix.dtype), matrix[rows.start : rows.stop]):
                return False
        return True

    def _pieces(self, num_rows: int, width: int) -> Iterator[range]:
        step = max(1, self._piece_bytes // (4 * width))
        for start in range(0, num_rows, step):
            yield range(start, min(start + step, num_rows))

    def _rows(self, part: AdaptedPart, outputs: Outputs) -> Tensor:
        """Read rows of the part's matrix in float32."""
        run = outputs if isinstance(outputs, range) else range(int(outputs.min()), int(outputs.max()) + 1)
        wanted = replace(part.weight, axis=0, shard=run)
        try:
            rows = self._checkpoint.load(wanted) if part.is_exact else as_floats(load_matrix(self._checkpoint, wanted))
        except ConfigError as error:
            raise RequestError(f"DoRA needs the weight of {part.module}: {error}") from None
        return rows.float() if isinstance(outputs, range) else rows[outputs - run.start].float()


def rows_of(matrix: Tensor, outputs: Outputs) -> Tensor:
    """Return the rows `outputs` of a matrix, as a view if they are consecutive."""
    return matrix[outputs.start : outputs.stop] if isinstance(outputs, range) else matrix[outputs]
