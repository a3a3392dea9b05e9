"""KVCopies: copies blocks between a rank's KV cache and its part of the arena's slots, as a step orders.

A slot holds the parts of all ranks of this host side by side; a block is opaque bytes. Stores come first, then loads,
in the order of the message, and all of them before the step changes or computes anything. On a GPU they run on the
stream that computes: a copy must follow the steps before it and precede this one, so a second stream would overlap
nothing.

After a step's result the core may give its slots away, so the copies of all ranks must be done by then. In a step with
rows the model's collectives ensure that, since a rank joins them after its copies. A step that only copies has a
collective for this purpose alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....ipc.errors import ConfigError, ProtocolError
from ....ipc.messages.workers import SchedulerOutput
from ....ipc.process.arena import Arena
from ....ipc.process.machine_memory import gib
from ...device.token_copy import PendingCopy
from ...machine.arrays import I32
from ...machine.parallel import ParallelGroup
from ...step.runner_feature import BegunStep, RunnerFeature


def pin_arena(arena: Arena) -> None:
    """Pin the arena in memory and map it for the current GPU, once in a process, so that copies need not wait for the
    host. ConfigError if the system refuses."""
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error:
        raise ConfigError(
            f"cannot pin {gib(memory.numel())} of memory for KV tiers (CUDA error {error}): lower --kv-host-bytes, or "
            "raise `ulimit -l` or the memory limit of the container"
        )


class KVCopies(RunnerFeature):
    """Feature that copies blocks. It has views of the cache's blocks and of this rank's part of each slot, and owns
    neither memory."""

    orders = ("stores", "loads")

    def __init__(self, arena: Arena, kv_cache: Tensor, group: ParallelGroup, local_ranks: Sequence[int]) -> None:
        """kv_cache: as in KVCacheSpec.shape; local_ranks: of this host, in order. ProtocolError if the arena was made
        for other blocks."""
        self._blocks = kv_cache.view(torch.uint8).flatten(1)  # [num_blocks, block_bytes]
        shape, block_bytes = arena.shape, self._blocks.shape[1]
        if shape.slot_bytes != block_bytes * len(local_ranks):
            raise ProtocolError(f"{len(local_ranks)} blocks of {block_bytes} bytes are no slot of {shape.slot_bytes}")
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        size, strides = (shape.num_slots, block_bytes), (shape.stride, 1)
        self._slots = memory.as_strided(
            size, strides, local_ranks.index(group.rank) * block_bytes
        )  # slot n in row n - 1
        self._group, self._device = group, kv_cache.device

    def begin(self, step: SchedulerOutput, begun: BegunStep) -> None:
        """Make the step's copies, or on a GPU start them. ProtocolError, before anything is copied, for an id out of
        range."""
        if not (step.stores or step.loads):
            return
        begun.enter("copy blocks")
        stores, loads = _pairs("stores", step.stores), _pairs("loads", step.loads)
        self._check(np.concatenate([stores[:, 0], loads[:, 1]]), len(self._blocks) - 1, "block")
        self._check(np.concatenate([stores[:, 1], loads[:, 0]]), len(self._slots), "slot")
        self._copy(self._blocks, self._slots, stores - (0, 1))
        self._copy(self._slots, self._blocks, loads - (1, 0))
        if not step.rows and self._group.size > 1:
            self._group.all_reduce(torch.zeros(1, device=self._device))
        begun.pending = PendingCopy.on_stream(self._device)

    def _copy(self, sources: Tensor, targets: Tensor, pairs: I32) -> None:
        """Copy rows of `sources` to rows of `targets`; pairs: [n, 2]."""
        if self._device.type == "cpu":  # memcpy, in half the time of a copy by torch
            source_rows, target_rows = sources.numpy(), targets.numpy()
            for source, target in pairs.tolist():
                target_rows[target] = source_rows[source]
        else:
            for source, target in pairs.tolist():
                targets[target].copy_(sources[source], non_blocking=True)

    def _check(self, ids: I32, last: int, kind: str) -> None:
        """Raise ProtocolError unless all ids are in [1, last]; block 0 is the null block."""
        if ids.min() < 1 or ids.max() > last:
            raise ProtocolError(f"{kind}s {ids.min()} to {ids.max()} are not all in [1, {last}]")


def _pairs(name: str, ids: bytes) -> I32:
    """Decode pairs of ids [n, 2]; ProtocolError if they make none."""
    if len(ids) % 8:
        raise ProtocolError(f"{name} holds {len(ids)} bytes, which make no pairs of ids")
    return np.frombuffer(ids, np.int32).reshape(-1, 2)
