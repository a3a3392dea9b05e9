"""How many KV blocks a worker has room for, and the tensor that holds them.

Three ways, the first that applies: the operator's number of blocks, the operator's number of bytes, what is free. On
a GPU that is measured by a run of the largest step; on a CPU, where others live in the same memory, it is a share of
what is available. Knows no model: a block is a number of bytes.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..ipc.errors import ConfigError

CPU_SHARE = 0.5  # of the available memory, for all local ranks together
CPU_MAX_BYTES = 4 << 30  # for all local ranks together; more only where one request of max_model_len needs it
GPU_RESERVE_BYTES = 128 << 20  # for what the allocator cannot use because of fragmentation
MIN_BLOCKS = 2  # the null block and one that holds data


@dataclass(frozen=True)
class KVCacheLimits:
    """What the operator asks for, and the most that can be used. All for one rank."""

    block_bytes: int
    max_blocks_per_row: int  # that a request of max_model_len needs
    max_num_seqs: int
    num_blocks: int | None  # --num-kv-blocks
    num_bytes: int | None  # --kv-cache-memory-bytes

    @property
    def useful_blocks(self) -> int:
        """More can never be referenced: every row full, and the null block."""
        return self.max_num_seqs * self.max_blocks_per_row + 1

    def fit(self, free_bytes: int, share_bytes: int) -> int:
        """How many blocks to allocate. free_bytes: what is there at all; share_bytes: what to take unasked."""
        if self.num_blocks is not None:
            self._check(self.num_blocks * self.block_bytes, free_bytes, f"--num-kv-blocks {self.num_blocks} needs")
            return self.num_blocks
        if self.num_bytes is not None:
            self._check(self.num_bytes, free_bytes, "--kv-cache-memory-bytes asks for")
            return self._checked(min(self.num_bytes // self.block_bytes, self.useful_blocks), self.num_bytes)
        for_one_request = (self.max_blocks_per_row + 1) * self.block_bytes
        if share_bytes < for_one_request <= free_bytes:
            share_bytes = for_one_request
        return self._checked(min(share_bytes // self.block_bytes, self.useful_blocks), share_bytes)

    def _check(self, needed: int, free: int, what: str) -> None:
        if needed > free:
            raise ConfigError(f"{what} {gib(needed)} of KV cache on each rank, {gib(free)} is free: lower it")

    def _checked(self, num_blocks: int, num_bytes: int) -> int:
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"{gib(max(num_bytes, 0))} for the KV cache holds {max(num_blocks, 0)} blocks of {self.block_bytes} "
                f"bytes, {MIN_BLOCKS} are the least: free memory, or lower --block-size or the model's size"
            )
        return num_blocks


def fit_on_cpu(limits: KVCacheLimits, local_ranks: int) -> int:
    """How many blocks each of `local_ranks` processes that share this machine may have."""
    available = available_bytes()
    return limits.fit(available // local_ranks, int(min(CPU_MAX_BYTES, available * CPU_SHARE)) // local_ranks)


def fit_on_gpu(limits: KVCacheLimits, device: torch.device, activation_bytes: int, utilization: float) -> int:
    """How many blocks fit beside the weights, `activation_bytes` of the largest step and other programs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserve = activation_bytes + GPU_RESERVE_BYTES
    return limits.fit(free - reserve, int(total * utilization) - (total - free) - reserve)


def available_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: the machine's, or its cgroup's if that is less."""
    return min(int(psutil.virtual_memory().available), *_cgroup_headrooms(cgroup_root))


def _cgroup_headrooms(root: Path) -> list[int]:
    """What each limit from this process's cgroup up to the root leaves; at least one entry."""
    headrooms = [1 << 62]
    try:
        membership = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return headrooms
    for line in membership:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root if controllers == "" else root / "memory"
        names = ("memory.max", "memory.current") if controllers == "" else _V1_NAMES
        folder = base / path.lstrip("/")
        folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
        headrooms += [headroom for folder in folders if (headroom := _headroom(folder, *names)) is not None]
    return headrooms


_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _headroom(folder: Path, limit_name: str, usage_name: str) -> int | None:
    """Limit − usage + file cache that the kernel gives back on demand; None without a limit."""
    try:
        limit = (folder / limit_name).read_text(encoding="utf-8").strip()
        usage = int((folder / usage_name).read_text(encoding="utf-8"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    reclaimable = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return max(int(limit) - usage + reclaimable, 0)


def allocate_kv_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`. On the CPU a page costs memory only once it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # attention reads blocks all over the pool
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.1f} MiB"
