"""Tensor-parallel ranks as threads of one process, of which one computes at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from tokenloom.workers.machine.parallel import ParallelGroup

HANG_S = 600.0
T = TypeVar("T")


class ThreadedGroup(ParallelGroup):
    """One of several ranks that share a list, with a place for each, a barrier, and a baton.

    The rank that holds the baton computes: Triton's interpreter and transformers' loading change state of the process.
    """

    def __init__(self, rank: int, places: list[Tensor], barrier: threading.Barrier, baton: threading.Lock) -> None:
        super().__init__(rank, len(places))
        self._places, self._barrier, self._baton = places, barrier, baton

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._places[self.rank] = x.clone()
        self._meet()
        parts = list(self._places)
        self._meet()
        return parts

    def _meet(self) -> None:
        self._baton.release()
        try:
            self._barrier.wait()
        finally:
            self._baton.acquire()

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
    places, barrier, baton = [torch.empty(0)] * size, threading.Barrier(size, timeout=HANG_S), threading.Lock()
    with ThreadPoolExecutor(size) as threads:

        def run(rank: int) -> T:
            with baton:
                try:
                    return work(ThreadedGroup(rank, places, barrier, baton))
                except BaseException:
                    barrier.abort()
                    raise

        return [each.result() for each in [threads.submit(run, rank) for rank in range(size)]]
