"""PlainLinear and PlainExperts: packed layers of the reference operations, with slots for adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .contract import NO_ACTIVATION, Activation, LowRankUpdate, PackedLinear


class PlainSlots:
    """Adapter updates of one layer, by slot. `fill` copies their matrices to `device` in float32."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.updates: list[LowRankUpdate | None] = [None] * (num_slots + 1)  # slot 0 stays empty
        self._device = device

    def fill(self, slot: int, update: LowRankUpdate | None) -> None:
        if update is not None:
            to = self._device
            parts = [
                replace(part, a=part.a.to(to, torch.float32, copy=True), b=part.scaled_b.to(to), factor=1.0)
                for part in update.parts
            ]
            scale = None if update.scale is None else update.scale.to(to)
            update = LowRankUpdate(parts, scale)
        self.updates[slot] = update


@dataclass(eq=False)
class PlainLinear:
    """Linear layer of a float weight [out, in] and a bias [out]. Only its slots ever change."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation = NO_ACTIVATION
    slots: PlainSlots | None = None  # for adapters; None until AdapterSpace.attach

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // (2 if self.activation.is_gated else 1)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class PlainExperts:
    """Experts of a layer, each as two packed linear layers."""

    gate_up: list[PackedLinear]
    down: list[PackedLinear]

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in (*self.gate_up, *self.down))


def plain_table(table: Tensor | PackedLinear) -> Tensor:
    """Return an embedding table as a tensor [n, hidden]; one that is tied to the head is in a PlainLinear."""
    weight = table.weight if isinstance(table, PlainLinear) else table
    assert isinstance(weight, Tensor)
    return weight
