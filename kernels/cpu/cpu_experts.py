"""CpuExperts: a layer's experts for the C kernels (experts.c), and the C structs that describe such layers.

Structs hold addresses only: callers keep the contract's objects alive.
"""

from __future__ import annotations

from ctypes import Array, Structure, addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import ExpertsWeights, Routing
from ..reference import PlainExperts
from . import library as c
from .layer_structs import linear_struct, routing_struct


@dataclass(frozen=True, eq=False)
class CpuExperts:
    """Packed linear layers of a layer's experts, all of one shape, and their structs in two arrays [num_experts]."""

    linears: PlainExperts  # keeps the memory alive
    up: Array[Structure]
    down: Array[Structure]

    @classmethod
    def of(cls, plain: PlainExperts) -> CpuExperts:
        arrays = ((c.Linear * len(linears))(*map(linear_struct, linears)) for linears in (plain.gate_up, plain.down))
        return cls(plain, *arrays)

    @property
    def nbytes(self) -> int:
        return self.linears.nbytes

    def arrays(self, num_parts: int) -> list[tuple[Array[Structure], int]]:
        """Return the experts' first linears with `num_parts`, and their second ones with 1: the structs [num_experts],
        and the most parts (`LowRankPart`) that an adapter's update of such a linear has."""
        return [(self.up, num_parts), (self.down, 1)]

    def struct(self, routing: Routing) -> Structure:
        """Build the struct for a call that is given the router's scores."""
        rules = routing_struct(routing, len(self.up))
        return c.Experts(routing=rules, up=addressof(self.up), down=addressof(self.down))


def experts_struct(weights: ExpertsWeights) -> Structure:
    """Build the struct for a call that also computes the router's scores and the shared expert."""
    assert isinstance(weights.experts, CpuExperts), "packed by the same Ops"
    struct = weights.experts.struct(weights.routing)
    struct.router = addressof(linear_struct(weights.router))
    if weights.shared is not None:
        struct.shared_up = addressof(linear_struct(weights.shared.up))
        struct.shared_down = addressof(linear_struct(weights.shared.down))
    if weights.shared_gate is not None:
        struct.shared_gate = addressof(linear_struct(weights.shared_gate))
    return struct


def padded_scores(scores: Tensor) -> Tensor:
    """Copy scores [T, E] to float32 with room for whole vectors: [T, E rounded up to 16]."""
    num_tokens, num_experts = scores.shape
    padded = torch.zeros((num_tokens, -(-num_experts // 16) * 16))
    padded[:, :num_experts] = scores
    return padded
