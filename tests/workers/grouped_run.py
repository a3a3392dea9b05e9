"""GroupedRun: plays the core for a model with several KV groups, over one buffer that starts as NaN, without a runner.

A slab of the buffer is one group's at a time. Blocks behind a window are freed as the core frees them, and become NaN
at once; a slab without blocks is given to whichever group needs one next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.spec.kv.kv_groups import KVGroup
from tokenloom.tests.workers.random_schedule import frame, new_row
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.kv_cache import KVPool
from tokenloom.workers.step.model_step import compute

MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 128


class GroupedRun:
    """Requests by name, in rows of their own. `tables`: of each request, the blocks by group, 0 for freed ones."""

    def __init__(
        self, model: DecoderModel, groups: Sequence[KVGroup], block_size: int, num_blocks: Sequence[int], seed: int = 0
    ) -> None:
        """num_blocks: of each group, for which the pool has room at once."""
        self._model, self._groups, self._block_size = model, groups, block_size
        specs = model.kv_cache_specs(block_size, torch.float32)
        block_bytes = tuple(spec.block_bytes for spec in specs)
        empty = PoolShape.of(0, block_bytes)
        num_slabs = empty.num_slabs_for(num_blocks)
        self.shape = PoolShape(num_slabs, empty.slab_bytes, block_bytes)
        self.pool = KVPool(specs, self.shape, torch.device("cpu"))
        self.pool.buffer.view(torch.float32).fill_(torch.nan)
        of_caches, windows = [len(cache) for cache in self.pool.caches], [group.window for group in groups]
        self._batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, block_size, of_caches, windows=windows)
        self._rng = random.Random(seed)
        self._slabs = self._rng.sample(range(1, num_slabs), num_slabs - 1)  # without a group
        self._free: list[set[int]] = [set() for _ in groups]
        self.tables: dict[str, list[list[int]]] = {}
        self._rows: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self.num_freed = 0

    def admit(self, name: str, tokens: list[int], computed: int = 0) -> None:
        """Start a request with all its tokens known, of which `computed` are in blocks that `share` adds."""
        self._rows[name], self._computed[name] = len(self._rows), computed
        self.tables[name] = [[] for _ in self._groups]
        self._batch.admit(new_row(self._rows[name], tokens, computed))

    def share(self, name: str, other: str) -> None:
        """Give a request the blocks of another that it needs to continue, with null blocks before them."""
        num_blocks = self._computed[name] // self._block_size
        appends = []
        for index, group in enumerate(self._groups):
            first = num_blocks - group.num_needed(num_blocks, self._block_size)
            found = [0] * first + self.tables[other][index][first:num_blocks]
            assert all(found[first:])
            self.tables[name][index] = found
            appends += [(self._rows[name], index, block) for block in found]
        self._batch.append_blocks(np.array(appends, np.int32))

    def step(self, counts: dict[str, int]) -> dict[str, Tensor]:
        """Compute the next tokens of each request: their logits [n, vocab]; on ranks other than 0 [0, vocab]."""
        appends, frees = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        for name, count in counts.items():
            self._grow(name, count, appends, frees)
        self._batch.append_blocks(np.array(appends, np.int32).reshape(-1, 3), np.array(frees, np.int32).reshape(-1, 3))
        names = {self._rows[name]: name for name in counts}
        layout = self._batch.layout(frame(*names), frame(*counts.values()))
        inputs = self._batch.prepare(layout)
        inputs = inputs._replace(sampled_tokens=np.arange(len(inputs.token_ids)))
        with torch.inference_mode():
            logits = compute(self._model, inputs, self.pool.caches)[1].clone()
        self._batch.advance(layout)
        for name, count in counts.items():
            self._computed[name] += count
        if not len(logits):
            return {}
        parts = logits.split(np.diff(inputs.query_starts).tolist())
        return {names[row]: part for row, part in zip(inputs.rows.tolist(), parts, strict=True)}

    def _grow(
        self, name: str, count: int, appends: list[tuple[int, int, int]], frees: list[tuple[int, int, int]]
    ) -> None:
        computed, row = self._computed[name], self._rows[name]
        for index, (group, table) in enumerate(zip(self._groups, self.tables[name], strict=True)):
            num_missing = -(-(computed + count) // self._block_size) - len(table)
            for _ in range(num_missing):
                table.append(self._take(index))
                appends.append((row, index, table[-1]))
            num_behind = 0 if group.window is None else max(computed - group.window + 1, 0) // self._block_size
            if num_missing > 0 and any(table[:num_behind]):
                self._release(index, [block for block in table[:num_behind] if block])
                table[:num_behind] = [0] * num_behind
                frees.append((row, index, num_behind))

    def _take(self, group: int) -> int:
        """Take a block of a slab of the group, if need be of a new slab."""
        free = self._free[group]
        if not free:
            free |= self._whole_blocks(group, self._slabs.pop())
        block = self._rng.choice(sorted(free))
        free.remove(block)
        return block

    def _release(self, group: int, blocks: list[int]) -> None:
        """Overwrite freed blocks with NaN, and take slabs that have no others from the group."""
        shared = [table[group] for table in self.tables.values()]
        for block in blocks:
            if sum(block in table for table in shared) > 1:
                continue
            self.num_freed += 1
            self.pool.caches[group][block] = torch.nan
            self._free[group].add(block)
        for slab in {block * self.shape.block_bytes[group] // self.shape.slab_bytes for block in blocks}:
            whole = self._whole_blocks(group, slab)
            if whole and whole <= self._free[group]:
                self._free[group] -= whole
                self._slabs.append(slab)

    def _whole_blocks(self, group: int, slab: int) -> set[int]:
        size, start = self.shape.block_bytes[group], slab * self.shape.slab_bytes
        return set(range(-(-start // size), (start + self.shape.slab_bytes) // size))
