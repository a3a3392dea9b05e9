"""Device memory of adapters' updates, by slot, and the copies that fill it.

All of it is allocated when a layer is attached, so that a fill allocates nothing on the device and a recorded CUDA
graph reads the new contents at the same addresses. The copies to a GPU run on a separate stream, from pinned memory: no
step waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import LowRankPart, LowRankUpdate
from .low_rank import PAGE, PART_FIELDS, SLOT_FIELDS, LowRankMatrices

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 2


class HostCopies:
    """Copier of host tensors to a device through pinned buffers, for one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(NUM_BUFFERS):
                buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
                self._buffers.append((buffer, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to `target`, both contiguous and of equal size and dtype. A copy to a GPU may still run on
        return: see `wait`."""
        if self._stream is None:
            target.copy_(source.view(target.shape))
            return
        whole, goal = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        with torch.cuda.stream(self._stream):
            for start in range(0, len(whole), BUFFER_BYTES):
                piece = whole[start : start + BUFFER_BYTES]
                buffer, is_copied = self._buffers[self._turn]
                self._turn = (self._turn + 1) % NUM_BUFFERS
                is_copied.synchronize()
                buffer[: len(piece)].copy_(piece)
                goal[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
                is_copied.record()

    def wait(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True)
class SlotShape:
    """Limits of a layer's updates, and the dtype and device of their matrices."""

    num_slots: int
    max_rank: int  # a multiple of PAGE
    dtype: torch.dtype
    device: torch.device

    def matrices(self, num_experts: int, num_outputs: int, num_inputs: int, num_parts: int) -> LowRankMatrices:
        """Allocate empty slots for a layer (num_experts 1) or for the experts of a layer."""
        return self._allocate((num_parts * self.max_rank, num_inputs), num_experts, num_outputs, num_parts)

    def look_ups(self, num_ids: int, width: int) -> LowRankMatrices:
        """Allocate empty slots for an embedding; A is transposed, with a row per token id."""
        return self._allocate((num_ids, self.max_rank), 1, width, 1)

    def _allocate(
        self, a_shape: tuple[int, int], num_experts: int, num_outputs: int, num_parts: int
    ) -> LowRankMatrices:
        lead, device = (self.num_slots, num_experts), self.device
        num_fields = SLOT_FIELDS.value + PART_FIELDS.value * num_parts
        return LowRankMatrices(
            a=torch.empty((*lead, *a_shape), dtype=self.dtype, device=device),
            b=torch.empty((*lead, num_outputs * self.max_rank), dtype=self.dtype, device=device),
            info=torch.zeros((*lead, num_fields), dtype=torch.int32, device=device),
            scales=torch.empty((*lead, num_outputs), dtype=torch.float32, device=device),
            num_parts=num_parts,
        )


class TritonLinearSlots:
    """All slots of a linear layer, of an embedding or of a layer's experts, with the methods that fill them."""

    def __init__(self, matrices: LowRankMatrices, shape: SlotShape, copies: HostCopies, is_look_up: bool) -> None:
        self.matrices = matrices
        self._shape = shape
        self._copies = copies
        self._is_look_up = is_look_up

    def fill(self, slot: int, update: LowRankUpdate | None) -> None:
        """Set a slot's update for a layer without experts."""
        self.set(slot, [update])

    @torch.inference_mode()
    def set(self, slot: int, updates: Sequence[LowRankUpdate | None]) -> None:
        """Set a slot's updates, one for each expert. ValueError if `slot` is not in [1, num_slots], or if an update has
        too many parts or too high a rank."""
        for update in updates:
            self._check(slot, update)
        info = torch.zeros(self.matrices.info.shape[1:], dtype=torch.int32)
        for expert, update in enumerate(updates):
            if update is not None and (update.parts or update.scale is not None):
                info[expert] = self._send_update((slot - 1, expert), update)
        self._copies.send(info, self.matrices.info[slot - 1])

    def _send_update(self, at: tuple[int, int], update: LowRankUpdate) -> Tensor:
        """Copy an update's matrices to the slot and expert `at`; return the update's `info`."""
        matrices = self.matrices
        # The kernels skip an update of rank 0, also its scale: one without parts gets a part without outputs.
        parts = update.parts or [LowRankPart(0, torch.zeros(1, matrices.a.shape[3]), torch.zeros(0, 1))]
        self._send(torch.cat([self._rows_of(part) for part in parts]), matrices.a[at])
        stride = -(-max(len(part.a) for part in parts) // PAGE) * PAGE
        b = torch.zeros((matrices.scales.shape[2], stride), dtype=self._shape.dtype)
        for part in parts:
            b[part.first_output : part.first_output + len(part.b), : part.b.shape[1]] = part.scaled_b
        self._send(b, matrices.b[at])
        if update.scale is not None:
            self._send(update.scale.float(), matrices.scales[at])
        return self._info(parts, stride, update.scale is not None)

    def _rows_of(self, part: LowRankPart) -> Tensor:
        """Return A as it is stored: [rank, in], or for an embedding [ids, max_rank]."""
        a = part.a.to(self._shape.dtype)
        return torch.nn.functional.pad(a.T, (0, self._shape.max_rank - len(a))) if self._is_look_up else a

    def _send(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to the first elements of `target`."""
        self._copies.send(source.contiguous(), target.view(-1)[: source.numel()])

    def _info(self, parts: Sequence[LowRankPart], stride: int, has_scale: bool) -> Tensor:
        """Return the `info` of an update: int32 fields that the kernels read. Missing parts get empty ranges of outputs
        and ranks."""
        fields, rank = [stride, int(has_scale)], 0
        for part in parts:
            fields += [part.first_output, part.first_output + len(part.b), rank, rank + len(part.a)]
            rank += len(part.a)
        fields += [0, 0, rank, rank] * (self.matrices.num_parts - len(parts))
        return torch.tensor(fields, dtype=torch.int32)

    def _check(self, slot: int, update: LowRankUpdate | None) -> None:
        parts = () if update is None else update.parts
        if not 1 <= slot <= self._shape.num_slots:
            raise ValueError(f"slot {slot} is filled, slots are [1, {self._shape.num_slots}]")
        if len(parts) > self.matrices.num_parts:
            raise ValueError(f"an update has {len(parts)} parts, the layer's slots hold {self.matrices.num_parts}")
        rank = max((len(part.a) for part in parts), default=0)
        if rank > self._shape.max_rank:
            raise ValueError(f"an update has rank {rank}, slots hold {self._shape.max_rank}: raise --max-lora-rank")


class TritonExpertSlots:
    """All slots of the two linear layers of each expert in a layer."""

    def __init__(self, ups: TritonLinearSlots, downs: TritonLinearSlots) -> None:
        self._ups, self._downs = ups, downs
        self.ups, self.downs = ups.matrices, downs.matrices

    def fill(self, slot: int, ups: Sequence[LowRankUpdate | None], downs: Sequence[LowRankUpdate | None]) -> None:
        """Set a slot's updates for all experts; empty sequences remove them. ValueError as in TritonLinearSlots.set."""
        for slots, updates in ((self._ups, ups), (self._downs, downs)):
            slots.set(slot, updates or [None] * slots.matrices.b.shape[1])
