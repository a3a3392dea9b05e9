"""PlainAdapterSpace: the slots of adapters for the reference operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import LowRankUpdate, PackedExperts, PackedLinear
from .plain_weights import PlainExperts, PlainLinear, PlainSlots, plain_table


@dataclass(frozen=True, eq=False)
class PlainExpertSlots:
    """Slots of the two linear layers of each expert in a layer."""

    ups: list[PlainSlots]
    downs: list[PlainSlots]

    def fill(self, slot: int, ups: Sequence[LowRankUpdate | None], downs: Sequence[LowRankUpdate | None]) -> None:
        for layers, updates in ((self.ups, ups), (self.downs, downs)):
            for layer, update in zip(layers, updates or [None] * len(layers), strict=True):
                layer.fill(slot, update)


class PlainAdapterSpace:
    """AdapterSpace of layers packed by ReferenceOps. Owns the step's token slots; each layer owns its updates."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self.token_slots: Tensor | None = None  # [T] slots of the tokens that the next calls compute; None: all 0
        self._step_slots: Tensor | None = None  # [T] slots of all tokens of the step; None: all 0
        self._max_rank = max_rank
        self._num_bytes = 0
        self._embedding = PlainSlots(num_slots, torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        return self._num_bytes

    def attach(self, packed: PackedLinear, num_parts: int) -> PlainSlots:
        assert isinstance(packed, PlainLinear) and packed.slots is None, "a layer gets slots once"
        num_outputs, num_inputs = packed.weight.shape
        self._count(num_parts * num_inputs + num_outputs, num_outputs)
        packed.slots = PlainSlots(self.num_slots, packed.weight.device)
        return packed.slots

    def attach_experts(self, packed: PackedExperts, num_parts: int) -> PlainExpertSlots:
        assert isinstance(packed, PlainExperts)
        ups = [self.attach(each, num_parts) for each in packed.gate_up]
        return PlainExpertSlots(ups, [self.attach(each, 1) for each in packed.down])

    def attach_embedding(self, table: Tensor | PackedLinear, first_id: int) -> PlainSlots:
        weight = plain_table(table)
        self._count(sum(weight.shape), 0)
        self._embedding = PlainSlots(self.num_slots, weight.device)
        return self._embedding

    def begin_step(self, token_slots: Tensor | None) -> None:
        self._step_slots = self.token_slots = token_slots

    def choose_tokens(self, indices: Tensor) -> None:
        self.token_slots = None if self._step_slots is None else self._step_slots[indices]

    def wait_for_fills(self) -> None:
        """Return at once: fills and steps share the device's queue, so a step's operations run after earlier fills."""

    def update_embedding(self, embedded: Tensor, ids: Tensor, is_foreign: Tensor) -> None:
        """Add the updates to looked-up rows `embedded` [T, hidden] in place, one token at a time. ids: [T], rows of the
        table; is_foreign: [T], whether the token has no row in the table."""
        if self.token_slots is None:
            return
        for token, slot in enumerate(self.token_slots.tolist()):
            update = self._embedding.updates[slot]
            if update is None or is_foreign[token]:
                continue
            for part in update.parts:
                embedded[token] = embedded[token].float() + part.b @ part.a[:, ids[token]]

    def _count(self, num_elements_per_rank: int, num_scales: int) -> None:
        self._num_bytes += 4 * self.num_slots * (self._max_rank * num_elements_per_rank + num_scales)


def update_outputs(
    outputs: Tensor, x: Tensor, packed: PlainLinear, updates: Sequence[LowRankUpdate | None], token_slots: Tensor
) -> None:
    """Add the updates to the base model's outputs [T, out] in place, before the activation. x: [T, in], the inputs."""
    for slot in sorted(set(token_slots.tolist())):
        update = updates[slot]
        if update is None:
            continue
        tokens = torch.where(token_slots == slot)[0]
        inputs = x[tokens]
        # a scale applies to the product without the bias
        has_bias = update.scale is None
        wide = (outputs[tokens] if has_bias else F.linear(inputs, packed.weight)).float()
        for part in update.parts:
            end = part.first_output + len(part.b)
            wide[:, part.first_output : end] += F.linear(F.linear(inputs.float(), part.a), part.b)
        if update.scale is not None:
            wide *= update.scale
            if packed.bias is not None:
                wide += packed.bias
        outputs[tokens] = wide.to(outputs.dtype)
