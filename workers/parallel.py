"""ParallelGroup: the ranks that shard each layer, what part of a layer is whose, and how they talk.

gloo on the loopback device for CPUs, NCCL for GPUs, over torch.distributed; the ranks find each other through a file
in the run directory. A group of one costs nothing and never touches torch.distributed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..ipc.errors import ConfigError


class ParallelGroup:
    """One rank's place among `size`. Every rank must make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(
                f"rank {rank} is not in [0, {size}): give each worker its own rank below the group's size"
            )
        self.rank = rank
        self.size = size

    @classmethod
    def connect(
        cls, rank: int, size: int, device: torch.device, store_file: Path, timeout_s: float = 600.0
    ) -> ParallelGroup:
        """Meet the other ranks at `store_file`, which must be new for each group; a group of one returns at once.

        A rank that does not come, or later does not join a call, within `timeout_s` makes that call raise; so does a
        peer that dies, at once.
        """
        group = cls(rank, size)
        if size == 1:
            return group
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's default, the address of the host's name, may not exist
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(store_file), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        return group

    def close(self) -> None:
        """Leave the group; harmless when there is none.

        One over NCCL is left by the end of the process: NCCL would wait for graphs that hold its calls, and for peers.
        """
        if self.size > 1 and dist.is_initialized() and dist.get_backend() != "nccl":
            dist.destroy_process_group()

    # ── what is whose ────────────────────────────────────────────────────────────────────────────────────────────────

    def shard(self, total: int, what: str) -> range:
        """This rank's part of `total` things that must divide evenly."""
        if total % self.size:
            raise ConfigError(
                f"{total} {what} do not divide by --tensor-parallel-size {self.size}: choose a divisor of {total}"
            )
        return range(self.rank * (total // self.size), (self.rank + 1) * (total // self.size))

    def shard_kv_heads(self, num_kv_heads: int) -> range:
        """The KV heads that this rank's query heads read: an even part, or one that several ranks hold."""
        if num_kv_heads % self.size == 0:
            return self.shard(num_kv_heads, "KV heads")
        if self.size % num_kv_heads:
            raise ConfigError(
                f"{num_kv_heads} KV heads and --tensor-parallel-size {self.size}: one must be a multiple of the other"
            )
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def shard_vocab(self, vocab_size: int) -> range:
        """This rank's token ids once the vocabulary is padded to a multiple of the ranks; the last may not exist."""
        return self.shard(-(-vocab_size // self.size) * self.size, "token ids")

    # ── how they talk ────────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place and returned; bit-equal on every rank."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Every rank's x [..., n] side by side on rank 0: [..., size * n]; None on the others."""
        if self.size == 1:
            return x
        if self.rank > 0:
            dist.gather(x.contiguous(), dst=0)
            return None
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.gather(x.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank, in place and returned; shapes and dtypes are equal on all ranks."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x


class NullGroup(ParallelGroup):
    """What a rank computes with when it is not to meet the others: shapes are a group's, values are its own."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        return torch.cat([x] * self.size, dim=-1) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        return x
