"""KVCopies: copies blocks between a rank's KV cache and its part of the arena's slots, as a step orders.

A slot holds a block of one KV group, the parts of all ranks of this host side by side; a block is opaque bytes. Stores
come first, then loads, in the order of the message, and all of them before the step changes or computes anything. On a
GPU they run on the stream that computes: a copy must follow the steps before it and precede this one, so a second
stream would overlap nothing.

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
    """Feature that copies blocks. It has views of the blocks of each KV group and of this rank's part of each slot, and
    owns neither memory."""

    orders = ("stores", "loads")

    def __init__(
        self, arena: Arena, blocks: Sequence[Tensor], group: ParallelGroup, local_ranks: Sequence[int]
    ) -> None:
        """blocks: by KV group, as KVPool has them; local_ranks: of this host, in order. ProtocolError if the arena was
        made for other blocks."""
        self._shape, self._group, self._device = arena.shape, group, blocks[0].device
        self._slots_of_slab = np.array(arena.shape.slots_of_slab, np.int32)
        self._blocks = blocks
        sizes = [each.shape[1] for each in blocks]
        if arena.shape.slot_bytes != tuple(size * len(local_ranks) for size in sizes):
            given, wanted = (" or ".join(map(str, each)) for each in (sizes, arena.shape.slot_bytes))
            raise ProtocolError(f"{len(local_ranks)} blocks of {given} bytes are no slot of {wanted}")
        memory, first = torch.frombuffer(arena.memory, dtype=torch.uint8), local_ranks.index(group.rank)
        self._slots = [  # [num_slabs, slots_of_slab, block_bytes]: each group's slots if it had all slabs
            memory.as_strided(
                (arena.shape.num_slabs, arena.shape.slots_of_slab[each], size),
                (arena.shape.slab_bytes, arena.shape.stride(each), 1),
                first * size,
            )
            for each, size in enumerate(sizes)
        ]

    def begin(self, step: SchedulerOutput, begun: BegunStep) -> None:
        """Make the step's copies, or on a GPU start them. ProtocolError, before anything is copied, for an id out of
        range."""
        if not (step.stores or step.loads):
            return
        begun.enter("copy blocks")
        stores, loads = _pairs("stores", step.stores), _pairs("loads", step.loads)
        blocks, numbers = np.concatenate([stores, loads[:, ::-1]]).T
        self._check(blocks, numbers)
        self._copy(blocks, numbers, len(stores))
        if not step.rows and self._group.size > 1:
            self._group.all_reduce(torch.zeros(1, device=self._device))
        begun.pending = PendingCopy.on_stream(self._device)

    def _copy(self, blocks: I32, numbers: I32, num_stores: int) -> None:
        """Copy blocks to the slots with these numbers, the first `num_stores` pairs, then slots to blocks.

        A slab of the pool may pass from one KV group to another in this step. So the blocks of all groups are stored
        before any is loaded, and loads keep their order."""
        slots, groups = np.divmod(numbers, len(self._slots))
        slabs, indexes = np.divmod(slots, self._slots_of_slab[groups])
        places = zip((slabs - 1).tolist(), indexes.tolist(), strict=True)
        copies = list(zip(groups.tolist(), blocks.tolist(), places, strict=True))
        stores, loads = copies[:num_stores], copies[num_stores:]
        if self._device.type == "cpu":  # memcpy, in half the time of a copy by torch
            of_blocks, of_slots = [each.numpy() for each in self._blocks], [each.numpy() for each in self._slots]
            for group, block, place in stores:
                of_slots[group][place] = of_blocks[group][block]
            for group, block, place in loads:
                of_blocks[group][block] = of_slots[group][place]
        else:
            for group, block, place in stores:
                self._slots[group][place].copy_(self._blocks[group][block], non_blocking=True)
            for group, block, place in loads:
                self._blocks[group][block].copy_(self._slots[group][place], non_blocking=True)

    def _check(self, blocks: I32, numbers: I32) -> None:
        """Raise ProtocolError unless all are ids of blocks, and numbers of slots, of the same groups; block 0 is the
        null block."""
        self._shape.check(numbers.tolist())
        groups = numbers % len(self._blocks)
        for group, cache in enumerate(self._blocks):
            ids, last = blocks[groups == group], len(cache) - 1
            if len(ids) and (ids.min() < 1 or ids.max() > last):
                raise ProtocolError(f"blocks {ids.min()} to {ids.max()} are not all in [1, {last}]")


def _pairs(name: str, ids: bytes) -> I32:
    """Decode pairs of ids [n, 2]; ProtocolError if they make none."""
    if len(ids) % 8:
        raise ProtocolError(f"{name} holds {len(ids)} bytes, which make no pairs of ids")
    return np.frombuffer(ids, np.int32).reshape(-1, 2)
