"""CpuOps.fused_moe against a loop over tokens in float64, at every instruction level; and how it reads weights."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import GATED_SILU, Activation, Routing
from tokenloom.kernels.cpu.cpu_experts import CpuExperts
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.today import some

CLAMPED = Activation("swiglu_clamped", is_gated=True, limit=0.7)
ROUTINGS: list[dict[str, Any]] = [
    {"score": "softmax"},
    {"score": "softmax", "is_normalized": True},
    {"score": "sigmoid", "is_normalized": True, "scale": 1.7},
    {"score": "softmax_of_chosen"},
]
GROUPS: list[dict[str, Any]] = [
    {"num_groups": 4, "top_groups": 2, "group_score": "max"},
    {"num_groups": 4, "top_groups": 3, "group_score": "top2"},
]


def route_one(scores: list[float], routing: Routing) -> dict[int, float]:
    """Return the weights of the chosen experts of one token, by plain arithmetic."""
    if routing.score == "softmax":
        total = sum(math.exp(score) for score in scores)
        values = [math.exp(score) / total for score in scores]
    else:
        values = [1 / (1 + math.exp(-score)) for score in scores] if routing.score == "sigmoid" else list(scores)
    bias = [0.0] * len(scores) if routing.choice_bias is None else routing.choice_bias.tolist()
    choice = [value + extra for value, extra in zip(values, bias, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [sorted(choice[start : start + size], reverse=True) for start in range(0, len(scores), size)]
    worth = [group[0] if routing.group_score == "max" else sum(group[:2]) for group in groups]
    is_open = [sorted(worth, reverse=True).index(each) < routing.top_groups for each in worth]
    candidates = [expert for expert in range(len(scores)) if routing.num_groups == 1 or is_open[expert // size]]
    chosen = sorted(candidates, key=lambda expert: -choice[expert])[: routing.top_k]
    weights = {expert: values[expert] for expert in chosen}
    if routing.score == "softmax_of_chosen":
        total = sum(math.exp(weight) for weight in weights.values())
        weights = {expert: math.exp(weight) / total for expert, weight in weights.items()}
    if routing.is_normalized:
        total = sum(weights.values())
        weights = {expert: weight / total for expert, weight in weights.items()}
    factors = [1.0] * len(scores) if routing.expert_scales is None else routing.expert_scales.tolist()
    return {expert: weight * routing.scale * factors[expert] for expert, weight in weights.items()}


@dataclass
class Layer:
    """Random experts, with the matrices as the model's dtype rounds them."""

    gate_up: Tensor  # [E, ups, hidden]
    down: Tensor  # [E, hidden, inner]
    biases: tuple[Tensor, Tensor] | None
    activation: Activation
    routing: Routing

    @classmethod
    def draw(
        cls,
        dtype: torch.dtype,
        num_experts: int,
        hidden: int,
        inner: int,
        routing: Routing,
        activation: Activation = GATED_SILU,
        has_bias: bool = False,
    ) -> Layer:
        num_ups = inner * (1 + activation.is_gated)
        gate_up = torch.randn(num_experts, num_ups, hidden) / hidden**0.5
        down = torch.randn(num_experts, hidden, inner) / inner**0.5
        biases = torch.randn(num_experts, num_ups).to(dtype), torch.randn(num_experts, hidden).to(dtype)
        return cls(gate_up.to(dtype), down.to(dtype), biases if has_bias else None, activation, routing)

    def mix(self, ops: CpuOps, x: Tensor, scores: Tensor) -> Tensor:
        packed = ops.pack_experts(list(self.gate_up), list(self.down), self.biases, self.activation)
        return ops.fused_moe(x, scores, packed, self.routing)

    def expected(self, x: Tensor, scores: Tensor) -> npt.NDArray[np.float64]:
        output = np.zeros(x.shape)
        for token, values in enumerate(x.double()):
            for expert, weight in route_one(scores[token].double().tolist(), self.routing).items():
                inner = self.gate_up[expert].double() @ values
                if self.biases is not None:
                    inner += self.biases[0][expert].double()
                answer = self.down[expert].double() @ ReferenceOps().activate(inner, self.activation)
                if self.biases is not None:
                    answer += self.biases[1][expert].double()
                output[token] += weight * answer.numpy()
        return output

    def check(self, ops: CpuOps, x: Tensor, scores: Tensor) -> None:
        """In bf16 the inner activation and each expert's output are rounded."""
        expected = self.expected(x, scores)
        allowed = (1e-5 if ops.dtype == torch.float32 else 0.01) * float(np.abs(expected).max())
        np.testing.assert_allclose(self.mix(ops, x, scores).double().numpy(), expected, atol=allowed, rtol=0)


def inputs(dtype: torch.dtype, num_tokens: int, num_experts: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Return x, with rows apart, and scores."""
    return torch.randn(num_tokens, hidden + 3).to(dtype)[:, :hidden], 2 * torch.randn(num_tokens, num_experts)


@pytest.mark.parametrize("seed", some(range(24), 6))
def test_experts_equal_a_loop_over_tokens(ops: CpuOps, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    groups = draw.choice([{}, *GROUPS])
    num_experts = 4 * draw.randint(2, 12) if groups else draw.randint(1, 40)
    num_tokens, hidden, inner = (
        draw.choice([1, 2, 3, 16, 17, 33, 100]),
        draw.choice([33, 64, 96]),
        draw.choice([15, 40]),
    )
    routing = Routing(
        draw.randint(1, min(num_experts, 4)),
        **draw.choice(ROUTINGS),
        **groups,
        choice_bias=torch.randn(num_experts) / 4 if draw.random() < 0.5 else None,
        expert_scales=torch.rand(num_experts) + 0.5 if draw.random() < 0.5 else None,
    )
    activation = draw.choice([GATED_SILU, CLAMPED, Activation("gelu_tanh"), Activation("relu2")])
    layer = Layer.draw(ops.dtype, num_experts, hidden, inner, routing, activation, has_bias=draw.random() < 0.5)
    layer.check(ops, *inputs(ops.dtype, num_tokens, num_experts, hidden))


def skewed_scores(num_tokens: int, num_experts: int) -> Tensor:
    """All tokens choose expert 5 and none expert 2; expert 0 has one token, the last."""
    scores = torch.randn(num_tokens, num_experts)
    scores[:, 5], scores[:, 2], scores[:, 0] = 9, -9, -9
    scores[-1, 0] = 8
    return scores


@pytest.mark.parametrize("num_tokens", [2, 16, 130])
def test_one_expert_has_all_tokens_one_has_one_and_one_has_none(ops: CpuOps, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    layer = Layer.draw(ops.dtype, 8, 64, 40, Routing(3, is_normalized=True))
    layer.check(ops, inputs(ops.dtype, num_tokens, 8, 64)[0], skewed_scores(num_tokens, 8))


def test_nan_and_infinity_do_not_spread_to_other_tokens(ops: CpuOps) -> None:
    torch.manual_seed(0)
    layer = Layer.draw(ops.dtype, 6, 64, 32, Routing(2))
    x, scores = inputs(ops.dtype, 20, 6, 64)
    calm = layer.mix(ops, x, scores)
    x[3], scores[3], x[4, 1], scores[4, 2] = torch.nan, torch.nan, torch.inf, torch.inf
    answer = layer.mix(ops, x, scores)
    assert answer[3].isnan().all() and not answer[4].isfinite().all()
    answer[3:5] = calm[3:5]
    assert torch.equal(answer, calm)


def test_the_size_of_packed_experts_is_that_of_their_weights(ops: CpuOps) -> None:
    layer = Layer.draw(ops.dtype, 4, 64, 32, Routing(2))
    packed = ops.pack_experts(list(layer.gate_up), list(layer.down))
    assert isinstance(packed, CpuExperts)
    assert packed.nbytes == layer.gate_up.nbytes + layer.down.nbytes
