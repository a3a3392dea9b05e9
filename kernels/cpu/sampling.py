"""CpuSampling: what a sampler asks of whole rows of logits, by the C kernels: the tokens that can win.

The bounds err towards keeping a token, so that whoever filters and scores what is left, in double precision, comes to
the same answer as over the whole vocabulary.
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

I64 = npt.NDArray[np.int64]

DRAW = np.dtype(c.Draw)


class Listed(NamedTuple):
    """The tokens of one draw that can win, by rising id, and the weight of all that count (0 where none was asked)."""

    token_ids: I64
    total: float


class CpuSampling:
    """logits are [n, vocab_size] float32, the elements of a row side by side.

    Not for two threads at once: it keeps scratch memory.
    """

    def __init__(self, library: c.KernelLibrary) -> None:
        self._library = library
        self._scratch = np.empty(0, np.int32)

    def list_candidates(self, logits: Tensor, draws: npt.NDArray[np.void]) -> list[Listed]:
        """The tokens of each draw that can win. draws: [m] of DRAW.

        A token weighs exp((logit - largest) / temperature). Listed are those that weigh at least least_weight and at
        least `share` of the total weight of those that weigh counted_weight or more and, where noise_scale > 0, whose
        bits are at most weight * noise_scale.
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
            Listed(self._scratch[start : start + count].astype(np.int64), total)
            for start, count, total in zip(starts, counts.tolist(), totals.tolist(), strict=True)
        ]


def load_cpu_sampling(spare_folder: Path | None = None) -> CpuSampling | None:
    """None where there are no kernels; `select_ops` says why in the log. `spare_folder`: as in `select_ops`."""
    try:
        return CpuSampling(load_kernels(True, spare_folder).library)
    except Unavailable:
        return None
