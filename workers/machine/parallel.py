"""ParallelGroup: a tensor-parallel group, with the shard of each rank and the collectives.

It uses torch.distributed with gloo for CPUs and NCCL for GPUs, on one network interface. The ranks find each other
through a store (`rendezvous.py`). A group of one never uses torch.distributed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ...ipc.errors import ConfigError
from .rendezvous import LOOPBACK, Rendezvous

Backend: TypeAlias = Literal["gloo", "nccl"]


class ParallelGroup:
    """One rank of a tensor-parallel group: its shards of sizes, and the collectives. All ranks must call the
    collectives in the same order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(
                f"rank {rank} is not in [0, {size}): give each worker its own rank below the group's size"
            )
        self.rank = rank
        self.size = size

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        rendezvous: Rendezvous,
        timeout_s: float = 600.0,
        backend: Backend | None = None,
    ) -> ParallelGroup:
        """Join the group through the store of `rendezvous`; a group of one returns at once.

        With gloo a collective raises if a rank does not join it within `timeout_s`, and at once if a peer dies; NCCL
        guarantees neither. A GPU `device` becomes the current one. `backend`: None chooses by the device. Ranks that
        share a GPU need gloo; its collectives cannot be part of a CUDA graph.
        """
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        group = cls(rank, size)
        if size == 1:
            return group
        if device.type == "cuda":
            torch.cuda.set_device(device)
        interface = rendezvous.interface()
        if backend == "gloo" or interface != LOOPBACK:  # on one host NCCL chooses by itself
            os.environ[f"{backend.upper()}_SOCKET_IFNAME"] = interface
        dist.init_process_group(
            backend,
            store=rendezvous.store(rank, size, timeout_s),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        return group

    def close(self) -> None:
        """Leave a gloo group. An NCCL group is only left by the end of the process: NCCL would wait for peers, and for
        graphs that contain its calls."""
        if self.size > 1 and dist.is_initialized() and dist.get_backend() != "nccl":
            dist.destroy_process_group()

    # ── shards ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def shard(self, total: int, unit: str) -> range:
        """Return this rank's part of `total`. ConfigError, with the `unit` in its message, if it does not divide
        evenly."""
        if total % self.size:
            raise ConfigError(
                f"{total} {unit} do not divide by --tensor-parallel-size {self.size}: choose a divisor of {total}"
            )
        return range(self.rank * (total // self.size), (self.rank + 1) * (total // self.size))

    def shard_kv_heads(self, num_kv_heads: int) -> range:
        """Return the KV heads that this rank's query heads read: an equal part of all, or one head that several ranks
        hold. ConfigError if neither the number of heads nor that of ranks is a multiple of the other."""
        if num_kv_heads % self.size == 0:
            return self.shard(num_kv_heads, "KV heads")
        if self.size % num_kv_heads:
            raise ConfigError(
                f"{num_kv_heads} KV heads and --tensor-parallel-size {self.size}: one must be a multiple of the other"
            )
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def shard_vocab(self, vocab_size: int) -> range:
        """Return this rank's part of the token ids, after padding the vocabulary to a multiple of the group's size."""
        return self.shard(-(-vocab_size // self.size) * self.size, "token ids")

    # ── collectives ──────────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place, and return it; the result has the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Concatenate every rank's x [..., n] on rank 0: [..., size * n]; None on the others."""
        if self.size == 1:
            return x
        if self.rank > 0:
            dist.gather(x.contiguous(), dst=0)
            return None
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.gather(x.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=-1)

    def gather_everywhere(self, x: Tensor) -> Tensor:
        """Concatenate every rank's x [..., n] on all ranks: [..., size * n]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's x to every rank, in place, and return it. Shape and dtype must be equal on all ranks."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x


class NullGroup(ParallelGroup):
    """Group without communication: results of collectives have the usual shapes, but only this rank's values."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        return torch.cat([x] * self.size, dim=-1) if self.rank == 0 else None

    def gather_everywhere(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x
