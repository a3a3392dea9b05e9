"""TritonAdapterSpace: adapters in the layers of a model on a GPU; see AdapterSpace in contract.py.

    linear: inner = shrink(x) ∥ the base model's product → expand: update, activation

While a CUDA graph is captured, shrink is recorded on a second stream, so that it runs in parallel with the base model's
product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..contract import PackedExperts, PackedLinear
from ..reference import PlainLinear, plain_table
from .linear.adapter_rows import SlotTiles, list_slots
from .linear.adapter_slots import HostCopies, SlotShape, TritonExpertSlots, TritonLinearSlots
from .linear.expand import expand
from .linear.low_rank import PAGE, LowRankMatrices, inner_like, look_up, shrink
from .linear.matmul import Matrices, QuantizedLinear
from .linear.moe import ExpertAdapters, TritonExperts


class TritonAdapterSpace:
    """AdapterSpace on a GPU. Owns the slots of all attached layers, and the slots of the step's tokens."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self._max_rank = -(-max_rank // PAGE) * PAGE
        self._copies: HostCopies | None = None  # this and the second stream: None until the first layer is attached
        self._side: torch.cuda.Stream | None = None
        self._linears: dict[int, tuple[PackedLinear, TritonLinearSlots]] = {}  # by id() of the layer; keeps it alive
        self._experts: dict[int, tuple[PackedExperts, TritonExpertSlots]] = {}
        self._tables: dict[int, tuple[Tensor | PackedLinear, TritonLinearSlots]] = {}
        self._step_slots: Tensor | None = None
        self._slots: Tensor | None = None  # slots of the tokens that the next calls compute
        self._tiles: SlotTiles | None = None  # the tiles of `_slots`; None until they are used

    # ── layers and memory ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def nbytes(self) -> int:
        all_slots = [slots.matrices for _, slots in (*self._linears.values(), *self._tables.values())]
        all_slots += [each for _, slots in self._experts.values() for each in (slots.ups, slots.downs)]
        return sum(matrices.nbytes for matrices in all_slots)

    def attach(self, packed: PackedLinear, num_parts: int) -> TritonLinearSlots:
        weight = _matrix_of(packed)
        like = SlotShape(self.num_slots, self._max_rank, *weight[:2])
        self._linears[id(packed)] = packed, self._slots_for(like, like.matrices(1, *weight[2:], num_parts))
        return self._linears[id(packed)][1]

    def attach_experts(self, packed: PackedExperts, num_parts: int) -> TritonExpertSlots:
        assert isinstance(packed, TritonExperts)
        slots = TritonExpertSlots(
            ups=self._slots_for_experts(packed.gate_up, num_parts), downs=self._slots_for_experts(packed.down, 1)
        )
        self._experts[id(packed)] = packed, slots
        return slots

    def _slots_for_experts(self, weights: Matrices, num_parts: int) -> TritonLinearSlots:
        num_experts, num_outputs, _ = weights.qweight.shape
        like = SlotShape(self.num_slots, self._max_rank, weights.dtype, weights.qweight.device)
        return self._slots_for(like, like.matrices(num_experts, num_outputs, weights.in_features, num_parts))

    def attach_embedding(self, table: Tensor | PackedLinear, first_id: int) -> TritonLinearSlots:
        weight = plain_table(table)
        like = SlotShape(self.num_slots, self._max_rank, weight.dtype, weight.device)
        self._tables[id(table)] = table, self._slots_for(like, like.look_ups(*weight.shape), is_look_up=True)
        return self._tables[id(table)][1]

    def _slots_for(self, shape: SlotShape, matrices: LowRankMatrices, is_look_up: bool = False) -> TritonLinearSlots:
        if self._copies is None:
            self._copies = HostCopies(shape.device)
            if shape.device.type == "cuda":
                self._side = torch.cuda.Stream(shape.device)  # type: ignore[no-untyped-call]
        return TritonLinearSlots(matrices, shape, self._copies, is_look_up)

    def wait_for_fills(self) -> None:
        if self._copies is not None:
            self._copies.wait()

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_step(self, token_slots: Tensor | None) -> None:
        self._step_slots = token_slots
        self._set_slots(token_slots)

    def choose_tokens(self, indices: Tensor) -> None:
        if self._step_slots is not None:
            self._set_slots(self._step_slots[indices])

    def _set_slots(self, slots: Tensor | None) -> None:
        self._slots = slots if slots is not None and len(slots) else None
        self._tiles = None

    def has_updates(self, packed: PackedLinear) -> bool:
        """Return whether rows of the step may have an adapter's update for this layer."""
        return self._slots is not None and id(packed) in self._linears

    def linear(
        self, x: Tensor, packed: PackedLinear, sums: Callable[[Tensor, PackedLinear], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Compute Ops.linear, in `dtype`, of a layer for which `has_updates` is true. x: [T, in] with dense rows. sums:
        function that computes the base model's outputs with the bias, before the activation."""
        matrices, tiles = self._linears[id(packed)][1].matrices, self._tiles_of(len(x))
        assert isinstance(packed, PlainLinear | QuantizedLinear)
        if self._side is not None and torch.cuda.is_current_stream_capturing():
            inner = inner_like(x, matrices, tiles)
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                shrink(x, matrices, tiles, inner)
            base = sums(x, packed)
            torch.cuda.current_stream().wait_stream(self._side)
        else:
            inner, base = shrink(x, matrices, tiles), sums(x, packed)
        return expand(base, inner, matrices, tiles, dtype, packed.bias, packed.activation)

    def update_embedding(
        self,
        output: Tensor,
        table: Tensor | PackedLinear,
        first_id: int,
        token_ids: Tensor,
        last_tokens: Tensor | None = None,
        is_decode: bool = False,
    ) -> None:
        """Add the adapters' updates to embedded tokens `output` [T, hidden] in place. token_ids, last_tokens: those of
        `embed_tokens`; in a decode step token_ids are row ids, −1 = padding."""
        if self._slots is None or id(table) not in self._tables:
            return
        matrices, tiles = self._tables[id(table)][1].matrices, self._tiles_of(len(output))
        inner = look_up(token_ids, last_tokens, self._slots, matrices, first_id, is_decode)
        expand(output, inner, matrices, tiles, output.dtype)

    def of_experts(self, packed: PackedExperts) -> ExpertAdapters | None:
        """Return the step's adapters for a layer's experts; None if there are none."""
        if self._slots is None or id(packed) not in self._experts:
            return None
        slots = self._experts[id(packed)][1]
        return ExpertAdapters(slots.ups, slots.downs, self._slots, self.num_slots)

    def _tiles_of(self, num_rows: int) -> SlotTiles:
        """Return the tiles of the next calls' tokens; they are listed when they are first used."""
        assert self._slots is not None and len(self._slots) == num_rows, "begin_step or choose_tokens gave other tokens"
        if self._tiles is None:
            self._tiles = list_slots(self._slots, self.num_slots)
        return self._tiles


def _matrix_of(packed: PackedLinear) -> tuple[torch.dtype, torch.device, int, int]:
    """Return the model's dtype, the device, and the outputs and inputs of a layer's matrix."""
    if isinstance(packed, QuantizedLinear):
        matrices = packed.matrices
        return matrices.dtype, matrices.qweight.device, matrices.out_features, matrices.in_features
    weight = plain_table(packed)
    return weight.dtype, weight.device, *weight.shape
