"""SamplingColumns: temperature, filters and seeds of many rows, one numpy column per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...ipc.messages.workers import RowSampling
from ..machine.arrays import F32, F64, I32, U32

MIN_TEMPERATURE = 1e-5  # as in vLLM; below it rows are greedy, since logit / temperature could overflow float32


@dataclass(frozen=True)
class SamplingColumns:
    """Temperature, filters and seeds of n rows. Their ranges and meanings are those of SamplingParams."""

    temperature: F32  # [n]
    top_k: I32  # [n], below 1: all
    top_p: F64  # [n]
    min_p: F64  # [n]
    seeds: U32  # [n, 2]: low and high word of the seed

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingColumns:
        return cls(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float64),
            min_p=np.zeros(num_rows, np.float64),
            seeds=np.zeros((num_rows, 2), np.uint32),
        )

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The columns in the order of the GPU kernels' arguments: temperature, top_k, top_p, min_p, seeds as int32."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds.view(np.int32)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether all rows are greedy. Cached, so use it only on a copy that `put` does not change."""
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
        """Return a copy of these rows, in this order."""
        return SamplingColumns(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seeds[rows]
        )
