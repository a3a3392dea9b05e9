"""SamplingColumns: the sampling parameters of many rows, one numpy column per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...ipc.messages.workers import RowSampling

MIN_TEMPERATURE = 1e-5  # as in vLLM: logits over less would leave float32; such rows are greedy


@dataclass(frozen=True)
class SamplingColumns:
    """Parameters of n rows; ranges and meanings as in SamplingParams."""

    temperature: npt.NDArray[np.float32]  # [n]
    top_k: npt.NDArray[np.int32]  # [n], below 1: all
    top_p: npt.NDArray[np.float64]  # [n]
    min_p: npt.NDArray[np.float64]  # [n]
    seeds: npt.NDArray[np.uint32]  # [n, 2]: low and high word of the seed

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingColumns:
        return cls(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float64),
            min_p=np.zeros(num_rows, np.float64),
            seeds=np.zeros((num_rows, 2), np.uint32),
        )

    @cached_property
    def is_greedy(self) -> bool:
        """Whether all rows are greedy. Cached: call it only on a copy that `put` does not change."""
        return not bool((self.temperature >= MIN_TEMPERATURE).any())

    def put(self, row: int, sampling: RowSampling) -> None:
        """Write the parameters of one row."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        seed = sampling.seed & 0xFFFFFFFFFFFFFFFF  # a negative seed is its two's complement
        self.seeds[row] = seed & 0xFFFFFFFF, seed >> 32

    def take(self, rows: npt.NDArray[np.integer]) -> SamplingColumns:
        """A copy of these rows, in this order."""
        return SamplingColumns(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seeds[rows]
        )
