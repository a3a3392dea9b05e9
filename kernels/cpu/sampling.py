"""CpuSampling: a C kernel that lists the candidates of each draw: the tokens that the draw can select.

Its bounds err towards keeping a token, so that filtering and scoring only the candidates in double precision selects
the same token as the whole vocabulary would.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import library as c
from .compiler import Unavailable
from .loader import load_kernels

DRAW = np.dtype(c.Draw)


class CandidateList(NamedTuple):
    """The candidates of one draw by rising id, and the total weight if the draw's `share` is positive (else 0)."""

    token_ids: npt.NDArray[np.int64]
    total: float


class CpuSampling:
    """The loaded kernel and its scratch memory. Not thread-safe."""

    def __init__(self, library: c.KernelLibrary) -> None:
        self._library = library
        self._scratch = np.empty(0, np.int32)

    def list_candidates(self, logits: Tensor, draws: npt.NDArray[np.void]) -> list[CandidateList]:
        """Return the candidates of each draw. logits: [n, vocab_size] float32, dense rows; draws: [m] of DRAW.

        A token's weight is exp((logit - largest) / temperature). A candidate's weight is at least least_weight, and at
        least `share` times the sum of all weights that are counted_weight or more. If noise_scale > 0, the candidate's
        noise bits are at most weight * noise_scale. Names in this paragraph are fields of DRAW.
        """
        vocab_size = logits.shape[1]
        draws = np.ascontiguousarray(draws, DRAW)
        if len(self._scratch) < len(draws) * vocab_size:
            self._scratch = np.empty(len(draws) * vocab_size, np.int32)
        counts, totals = np.empty(len(draws), np.int64), np.empty(len(draws), np.float64)
        self._library.list_candidates(
            logits.data_ptr(),
            logits.stride(0),
            vocab_size,
            draws.ctypes.data,
            len(draws),
            self._scratch.ctypes.data,
            counts.ctypes.data,
            totals.ctypes.data,
            torch.get_num_threads(),
        )
        starts = range(0, len(draws) * vocab_size, vocab_size)
        return [
            CandidateList(self._scratch[start : start + count].astype(np.int64), total)
            for start, count, total in zip(starts, counts.tolist(), totals.tolist(), strict=True)
        ]


def load_cpu_sampling(spare_folder: Path | None = None, isa: str = "auto") -> CpuSampling | None:
    """Load the kernel; return None if no C kernels can be used here. `spare_folder`, `isa`: see `load_kernels`. Raises
    ValueError if the processor lacks `isa`."""
    try:
        return CpuSampling(load_kernels(True, spare_folder, isa).library)
    except Unavailable:
        return None
