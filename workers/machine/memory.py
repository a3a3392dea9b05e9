"""KVCacheLimits: the limits that decide how much memory a worker allocates for the KV pool.

The operator's number of blocks decides if it is given, else the operator's number of bytes, else a share of memory. On
a GPU the share is the permitted part of its memory, less the weights, the activations of the largest step and the
memory that other programs use. On a CPU it is a part of the available memory, but at most CPU_MAX_BYTES. A share
smaller than one request of max_model_len is raised to that size if that much is free. Unless the operator gives the
number of blocks, no more memory is allocated than can be in use. Knows no model: a block is a number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...ipc.errors import ConfigError
from ...ipc.kv.pool_shape import PoolShape
from ...ipc.process.machine_memory import gib

CPU_SHARE = 0.5  # of the available memory, for all local ranks together
CPU_MAX_BYTES = 4 << 30  # for all local ranks together, unless one request of max_model_len needs more
GPU_RESERVE_BYTES = 128 << 20  # allowance for fragmentation in the allocator


@dataclass(frozen=True)
class KVCacheLimits:
    """The operator's limits and the largest useful pool, for one rank."""

    block_bytes: Sequence[int]  # of a block of each KV group
    blocks_per_row: Sequence[int]  # the most that a request of max_model_len holds at a time, by group
    max_num_seqs: int
    num_blocks: int | None  # --num-kv-blocks, of group 0
    num_bytes: int | None  # --kv-cache-memory-bytes

    @cached_property
    def _pool(self) -> PoolShape:
        """A pool without memory, for the size of its slabs."""
        return PoolShape.of(0, self.block_bytes)

    @property
    def useful_slabs(self) -> int:
        """The largest number of slabs that can be in use: all rows full, and the null blocks."""
        return self._pool.num_slabs_for(self.max_num_seqs * count for count in self.blocks_per_row)

    def fit(self, free_bytes: int, share_bytes: int) -> int:
        """Return the bytes to allocate, in whole slabs: those of the operator's number of blocks; or else as many as
        fit, but at most `useful_slabs`, in the operator's bytes or in `share_bytes`. `share_bytes` is raised to one
        request of max_model_len if `free_bytes` allows it. ConfigError if the operator's limit exceeds `free_bytes`,
        or, without the operator's number, if there is less than a slab for each group and one for the null blocks."""
        slab_bytes = self._pool.slab_bytes
        if self.num_blocks is not None:
            # A request has as much room as in a pool of one group with that number of blocks.
            floor = self._pool.num_slabs_for(min(count, self.num_blocks - 1) for count in self.blocks_per_row)
            num_bytes = max(-(-self.num_blocks * self.block_bytes[0] // slab_bytes), floor) * slab_bytes
            self._check(num_bytes, free_bytes, f"--num-kv-blocks {self.num_blocks} needs")
            return num_bytes
        if self.num_bytes is not None:
            self._check(self.num_bytes, free_bytes, "--kv-cache-memory-bytes asks for")
            return self._checked(min(self.num_bytes // slab_bytes, self.useful_slabs), self.num_bytes)
        for_one_request = self._pool.num_slabs_for(self.blocks_per_row) * slab_bytes
        if share_bytes < for_one_request <= free_bytes:
            share_bytes = for_one_request
        return self._checked(min(share_bytes // slab_bytes, self.useful_slabs), share_bytes)

    def _check(self, needed: int, free: int, option: str) -> None:
        if needed > free:
            raise ConfigError(f"{option} {gib(needed)} of KV cache on each rank, {gib(free)} is free: lower it")

    def _checked(self, num_slabs: int, num_bytes: int) -> int:
        least = 1 + len(self.block_bytes)
        if num_slabs < least:
            unit = "blocks" if len(self.block_bytes) == 1 else "slabs"
            mend = "free memory" if self.num_bytes is None else "raise --kv-cache-memory-bytes"
            raise ConfigError(
                f"{gib(max(num_bytes, 0))} for the KV cache holds {max(num_slabs, 0)} {unit} of "
                f"{self._pool.slab_bytes} bytes, {least} are the least: {mend}, or lower --block-size or the model's "
                "size"
            )
        return num_slabs * self._pool.slab_bytes


def check_adapters(num_bytes: int, free_bytes: int, num_slots: int, rank: int) -> None:
    """Raise ConfigError if the slots for adapters need more bytes than are free on a rank."""
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{num_slots} slots for adapters of rank {rank} take {gib(num_bytes)} on each rank, {gib(free_bytes)} is "
            "free: lower --max-loras or --max-lora-rank, or give fewer --lora-target-modules"
        )


def fit_on_cpu(limits: KVCacheLimits, free_bytes: int, local_ranks: int) -> int:
    """Return the bytes that each of `local_ranks` worker processes on this machine allocates for the KV pool.
    free_bytes: available memory that nothing else will use. ConfigError if the operator's limit or the least number of
    slabs does not fit into a rank's part of it."""
    available = max(free_bytes, 0)
    return limits.fit(available // local_ranks, int(min(CPU_MAX_BYTES, available * CPU_SHARE)) // local_ranks)


def fit_on_gpu(limits: KVCacheLimits, device: torch.device, activation_bytes: int, utilization: float) -> int:
    """Empty torch's cache and return the bytes for the KV pool that fit, together with weights, activations and other
    programs, into the share `utilization` of the GPU's memory, within `limits`. ConfigError if the operator's limit
    does not fit into the free memory, or the least number of slabs not into the share."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserve = activation_bytes + GPU_RESERVE_BYTES
    return limits.fit(free - reserve, int(total * utilization) - (total - free) - reserve)
