"""StateTables: plays the core and the worker for the states of a model: gives each request blocks, and moves it on."""

from __future__ import annotations

import random

import torch

from tokenloom.kernels.contract import StateGroup, StateMetadata
from tokenloom.workers.step.state_cache import StateSpec

NOT_A_NUMBER = 0xFF  # in each byte, of any float


class StateTables:
    """The live block of each request. At each boundary of KV blocks a request goes on in another block; the one that it
    leaves is filled with NaN before the next step."""

    def __init__(self, spec: StateSpec, block_size: int, device: torch.device, num_blocks: int = 256) -> None:
        self._block_size, self._device = block_size, device
        buffer = torch.full((num_blocks * spec.block_bytes,), NOT_A_NUMBER, dtype=torch.uint8, device=device)
        self.views = spec.view(buffer)
        self._blocks = buffer.view(num_blocks, spec.block_bytes)
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)
        self._live: dict[str, int] = {}
        self._left: list[int] = []

    def step(self, rows: list[tuple[str, int, int]]) -> StateGroup:
        """Return the states for a step. rows: (request, computed tokens, new tokens) in the step's order."""
        self._blocks[self._left] = NOT_A_NUMBER
        self._free[:0] = self._left
        self._left = []
        starts, reads, writes = [0], list[int](), list[int]()
        for name, computed, count in rows:
            at, end = computed, computed + count
            while at < end:
                stop = min(end, (at // self._block_size + 1) * self._block_size)
                block = self._live.get(name, -1) if at else -1
                reads.append(block)
                if at % self._block_size == 0:
                    self._left += [block] if block >= 0 else []
                    block = self._live[name] = self._free.pop()
                writes.append(block)
                starts.append(starts[-1] + stop - at)
                at = stop
        columns = [torch.tensor(each, dtype=torch.int32, device=self._device) for each in (starts, reads, writes)]
        return StateGroup(self.views, StateMetadata(*columns))

    def forget(self, name: str) -> None:
        self._left.append(self._live.pop(name))
