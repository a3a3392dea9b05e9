"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from tokenloom.workers.parallel import ParallelGroup

TIMEOUT_S = 60.0
T = TypeVar("T")


class ThreadedGroup(ParallelGroup):
    """One of several ranks that share a list, with a place for each, and a barrier."""

    def __init__(self, rank: int, places: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(places))
        self._places, self._barrier = places, barrier

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._places[self.rank] = x.clone()
        self._barrier.wait(TIMEOUT_S)
        parts = list(self._places)
        self._barrier.wait(TIMEOUT_S)
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def gather(self, x: Tensor) -> Tensor | None:
        parts = self._exchange(x)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def gather_everywhere(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])


def run_ranks(size: int, work: Callable[[ParallelGroup], T]) -> list[T]:
    """Call `work` for each rank of a group at once; return the results by rank."""
    places, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as threads:

        def run(rank: int) -> T:
            try:
                return work(ThreadedGroup(rank, places, barrier))
            except BaseException:
                barrier.abort()
                raise

        return [each.result(TIMEOUT_S) for each in [threads.submit(run, rank) for rank in range(size)]]
