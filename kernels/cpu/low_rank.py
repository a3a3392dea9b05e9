"""CpuAdapterSpace: slots for adapters in layers of the C kernels (low_rank.c), and the grouped rows of a step.

The thread that fills a slot packs its updates, into memory that belongs to this slot, and publishes them by storing a
pointer for each layer; steps that use other slots can run at the same time. A layer's memory in a slot is reused if
the next update fits, else it is freed with the map that contains it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from ctypes import Array, Structure, addressof, byref, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from ..contract import LowRankPart, LowRankUpdate, PackedExperts, PackedLinear
from . import library as c
from .arena import PackedMemory
from .cpu_experts import CpuExperts
from .layer_structs import linear_struct

MAP_BYTES = 16 << 20  # size of a map of a slot's memory; pages that are not used yet cost nothing


class CpuLinearSlots:
    """Packed adapter updates of one layer, by slot. Owns their memory."""

    def __init__(self, space: CpuAdapterSpace, shape: Structure, is_embedding: bool = False) -> None:
        """shape: the layer's c.Linear; for an embedding, the token ids are its inputs."""
        self._space = space
        self._shape = shape
        self._is_embedding = is_embedding
        self.table: Array[c_void_p] = (c_void_p * (space.num_slots + 1))()
        self._memory = [(0, 0, object())] * len(self.table)  # address, size and owner

    def fill(self, slot: int, update: LowRankUpdate | None) -> None:
        if not 1 <= slot < len(self.table):
            raise ValueError(f"there is no slot {slot} among 1 … {len(self.table) - 1}")
        self.table[slot] = None
        if update is not None and (update.parts or update.scale is not None):
            self.table[slot] = self._pack(slot, update)

    def slot_bytes(self, num_parts: int, rank: int) -> int:
        """Return the bytes of an update with `num_parts` equal parts of this rank."""
        num_outputs = self._shape.num_outputs * (1 + self._shape.is_gated)
        cuts = [num_outputs * part // num_parts for part in range(num_parts + 1)]
        parts = [
            c.LowRankPart(first_output=start, num_outputs=stop - start, rank=rank)
            for start, stop in itertools.pairwise(cuts)
        ]
        return self._bytes_of(parts, not self._is_embedding)

    def _pack(self, slot: int, update: LowRankUpdate) -> int:
        """Pack an update into the slot's memory and return its address. No pointer to this memory may be published."""
        parts = [self._dense(part) for part in update.parts]
        structs = [self._struct_of(part) for part in parts]
        scale = None if update.scale is None else update.scale.contiguous()
        num_outputs = self._shape.num_outputs * (1 + self._shape.is_gated)
        assert scale is None or (scale.shape == (num_outputs,) and scale.dtype == torch.float32)
        assert scale is None or not self._is_embedding, "an embedding has no scale"
        num_bytes = self._bytes_of(structs, scale is not None)
        if num_bytes > self._memory[slot][1]:
            address, owner = self._space.allocate(slot, num_bytes)
            self._memory[slot] = address, num_bytes, owner
        address = self._memory[slot][0]
        self._space.library.pack_low_rank(
            byref(self._shape),
            _array(structs),
            len(structs),
            None if scale is None else scale.data_ptr(),
            self._is_embedding,
            address,
        )
        self._space.note_ranks(self._is_embedding, [part.rank for part in structs])
        return address

    def _bytes_of(self, parts: list[Structure], has_scale: bool) -> int:
        num_bytes = self._space.library.low_rank_bytes(
            byref(self._shape), _array(parts), len(parts), has_scale, self._is_embedding
        )
        return int(num_bytes)

    def _struct_of(self, part: LowRankPart) -> Structure:
        rank, num_inputs = part.a.shape
        assert num_inputs == self._shape.num_inputs and part.b.shape[1] == rank and rank > 0
        return c.LowRankPart(
            first_output=part.first_output,
            num_outputs=part.b.shape[0],
            rank=rank,
            a=part.a.data_ptr(),
            b=part.b.data_ptr(),
            has_floats=part.a.dtype == torch.float32,
            factor=part.factor,
        )

    def _dense(self, part: LowRankPart) -> LowRankPart:
        """Return a part with contiguous matrices in a dtype that the kernels can pack: their own, or float32."""
        dtype = self._space.dtype if part.a.dtype == part.b.dtype == self._space.dtype else torch.float32
        return replace(part, a=part.a.to(dtype).contiguous(), b=part.b.to(dtype).contiguous())


class CpuExpertSlots:
    """Slots of the two linear layers of each expert in a layer."""

    def __init__(self, ups: list[CpuLinearSlots], downs: list[CpuLinearSlots]) -> None:
        self._layers = ups, downs

    def fill(self, slot: int, ups: Sequence[LowRankUpdate | None], downs: Sequence[LowRankUpdate | None]) -> None:
        for layers, updates in zip(self._layers, (ups, downs), strict=True):
            for layer, update in zip(layers, updates or [None] * len(layers), strict=True):
                layer.fill(slot, update)


class _Group:
    """Tokens of one or more calls; those with adapters are grouped by slot (by the C function group_step)."""

    def __init__(self, library: c.KernelLibrary, token_slots: Tensor, num_slots: int) -> None:
        assert token_slots.dtype == torch.int32
        token_slots = token_slots.contiguous()
        self.num_tokens = len(token_slots)
        self.struct = c.Adapted()
        memory = torch.empty(library.step_words(self.num_tokens, num_slots), dtype=torch.int32)
        library.group_step(token_slots.data_ptr(), self.num_tokens, num_slots, memory.data_ptr(), byref(self.struct))
        self._kept = token_slots, memory


class CpuAdapterSpace:
    """AdapterSpace of layers packed by CpuOps. Owns the slots of all layers, and the groups of the step's tokens."""

    def __init__(self, library: c.KernelLibrary, dtype: torch.dtype, num_slots: int, max_rank: int) -> None:
        self.library = library
        self.dtype = dtype
        self.num_slots = num_slots
        self.embedding: CpuLinearSlots | None = None
        self._max_rank = max_rank
        self._num_bytes = 0
        self._layers: list[CpuLinearSlots] = []
        self._memories = [PackedMemory(MAP_BYTES) for _ in range(num_slots + 1)]  # each used by one thread at a time
        self._num_rank_tiles = 1
        self._lock = threading.Lock()
        self._shrunk = torch.empty(0, dtype=dtype)
        self._step_slots: Tensor | None = None
        self._step: _Group | None = None
        self._chosen: _Group | None = None

    @property
    def nbytes(self) -> int:
        return self._num_bytes

    def attach(self, packed: PackedLinear, num_parts: int) -> CpuLinearSlots:
        return self._attach(linear_struct(packed), num_parts)

    def attach_experts(self, packed: PackedExperts, num_parts: int) -> CpuExpertSlots:
        assert isinstance(packed, CpuExperts), "packed by the same Ops"
        ups, downs = ([self._attach(each, parts) for each in experts] for experts, parts in packed.arrays(num_parts))
        return CpuExpertSlots(ups, downs)

    def attach_embedding(self, table: Tensor | PackedLinear, first_id: int) -> CpuLinearSlots:
        num_ids, hidden_size = table.shape if isinstance(table, Tensor) else (table.out_features, table.in_features)
        shape = c.Linear(num_inputs=num_ids, num_outputs=hidden_size, num_pairs=-(-hidden_size // 32))
        self.embedding = CpuLinearSlots(self, shape, is_embedding=True)
        self._count(self.embedding, 1)
        return self.embedding

    def begin_step(self, token_slots: Tensor | None) -> None:
        self._step_slots = token_slots
        self._step = self._chosen = self._group(token_slots)

    def choose_tokens(self, indices: Tensor) -> None:
        self._chosen = self._group_of(indices)

    def wait_for_fills(self) -> None:
        """Return at once: `fill` stores the pointers before it returns."""

    def rows(self, num_rows: int, num_shrunk: int = 0) -> Structure | None:
        """Return the groups of the tokens that an operation computes; None if all slots are 0. They have scratch memory
        for `num_rows` (the number of tokens) or `num_shrunk` rows, whichever is more."""
        assert self._chosen is None or self._chosen.num_tokens == num_rows, "rows are not the tokens of begin_step"
        return self._with_scratch(max(num_rows, num_shrunk), self._chosen)[0]

    def step_rows(self, logits_indices: Tensor, num_shrunk: int) -> Sequence[Structure | None]:
        """Return the groups of the step's tokens and of the tokens that get logits, which become the chosen ones (see
        `choose_tokens`); each is None if all its slots are 0. Both are valid until the next step and have scratch
        memory for at least `num_shrunk` rows."""
        if self._step is None:
            return None, None
        self.choose_tokens(logits_indices)
        num_rows = max(self._step.num_tokens, len(logits_indices), num_shrunk)
        return self._with_scratch(num_rows, self._step, self._chosen)

    def allocate(self, slot: int, num_bytes: int) -> tuple[int, object]:
        """Allocate memory of a slot; return its address and its owner, which the caller keeps while it uses the
        memory."""
        return self._memories[slot].allocate(num_bytes)

    def note_ranks(self, is_embedding: bool, ranks: list[int]) -> None:
        """Record the ranks of an update's parts. Called before it is published, as scratch memory is sized for them."""
        num_tiles = -(-sum(rank + rank % 2 for rank in ranks) // 16)
        if not is_embedding:
            with self._lock:
                self._num_rank_tiles = max(self._num_rank_tiles, num_tiles)

    def _attach(self, struct: Structure, num_parts: int) -> CpuLinearSlots:
        assert struct.updates is None, "a layer gets slots once"
        slots = CpuLinearSlots(self, struct)
        struct.updates = addressof(slots.table)
        self._layers.append(slots)
        self._count(slots, num_parts)
        return slots

    def _count(self, slots: CpuLinearSlots, num_parts: int) -> None:
        self._num_bytes += self.num_slots * slots.slot_bytes(num_parts, self._max_rank)

    def _group_of(self, indices: Tensor) -> _Group | None:
        return None if self._step_slots is None else self._group(self._step_slots[indices])

    def _group(self, token_slots: Tensor | None) -> _Group | None:
        if token_slots is None:
            return None
        group = _Group(self.library, token_slots, self.num_slots)
        return group if group.struct.num_runs else None

    def _with_scratch(self, num_rows: int, *groups: _Group | None) -> list[Structure | None]:
        num_tiles = self._num_rank_tiles
        if self._shrunk.numel() < num_rows * num_tiles * 16:
            self._shrunk = torch.empty(num_rows * num_tiles * 16, dtype=self._shrunk.dtype)
        for struct in (group.struct for group in groups if group is not None):
            struct.num_rank_tiles, struct.shrunk_stride = num_tiles, num_tiles * 16
            struct.shrunk = self._shrunk.data_ptr()
        return [None if group is None else group.struct for group in groups]


def _array(parts: list[Structure]) -> Array[Structure]:
    array: Array[Structure] = (c.LowRankPart * len(parts))(*parts)
    return array
