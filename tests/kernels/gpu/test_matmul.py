"""Products with quantized matrices and with experts' against the reference, over random shapes, in the interpreter.

Tolerances, relative to the largest element: float32 1e-5 (sums of up to 600 terms in another order); float16 4e-3 (the
reference rounds the dequantised matrix, the kernel the product of a group alone; the answers of experts are rounded
before they are mixed). The reference is compared with numpy in test_reference.py and test_quantized.py.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from tokenloom.kernels.contract import GATED_SILU, NO_ACTIVATION, Activation, Routing
from tokenloom.kernels.gpu.linear.moe import CHUNK, list_rows, route
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.quantized import QuantizedWeight, Weight, concatenate, from_g_idx, quantize
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.reference import route as reference_route
from tokenloom.tests.support.today import some_pairs

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
FORMS = ("int8", "fp8", "int8 groups", "int4", "int4 act-order", "int4 one group", "fp8 blocks")


def check_close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = TOLERANCES[result.dtype] * max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 0.0
    torch.testing.assert_close(result, wanted, atol=bound, rtol=0)


def random_weight(rng: random.Random, form: str, num_out: int, num_in: int, dtype: torch.dtype) -> QuantizedWeight:
    """`num_in` is even. Elements are of deviation 1 / sqrt(num_in)."""
    group = num_in if form.endswith("one group") else rng.choice([16, 24, 32, 64, 128])
    groups = torch.arange(num_in) // group
    if form in ("int8", "fp8"):
        return quantize((torch.randn(num_out, num_in) / num_in**0.5).to(dtype), form)
    if form.endswith("act-order"):
        groups = groups[torch.randperm(num_in)]
    scales = (torch.rand(num_out, int(groups.max()) + 1) + 0.5) / num_in**0.5
    if form.startswith("int4"):
        zeros = torch.randint(1, 17, scales.shape, dtype=torch.uint8)
        codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
        whole = from_g_idx(codes, (scales / 8).half(), zeros, groups, dtype)
        assert whole.zeros is not None
        return dataclasses.replace(whole, zeros=whole.zeros + torch.randint_like(whole.zeros, 8))
    if form.startswith("int8"):
        codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
        return from_g_idx(codes, scales / 127, None, groups, dtype)
    codes = torch.randn(num_out, num_in).mul(90).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, 0] = 1  # the least there is, a subnormal
    return from_g_idx(codes, scales / 90, None, groups, dtype)


def random_shape(rng: random.Random) -> tuple[int, int, int]:
    """(rows, out, in)"""
    return (
        rng.choice([0, 1, 3, 16, 17, 40, 70]),
        rng.choice([1, 7, 64, 100, 130]),
        2 * rng.choice([1, 20, 64, 100, 150]),
    )


@pytest.mark.parametrize(("form", "seed"), some_pairs(FORMS, range(10), 10))
def test_quantized_linear_is_the_references(seed: int, form: str) -> None:
    rng = random.Random(f"{seed} {form}")
    torch.manual_seed(rng.getrandbits(32))
    dtype = rng.choice(list(TOLERANCES))
    num_rows, num_out, num_in = random_shape(rng)
    is_gated = rng.random() < 0.3
    weight = random_weight(rng, form, num_out * (1 + is_gated), num_in, dtype)
    if rng.random() < 0.3:
        weight = concatenate([weight, random_weight(rng, form, 2, num_in, dtype)])
    bias = rng.choice([None, torch.randn(weight.shape[0]).to(dtype)])
    x = torch.randn(num_rows, 2 * num_in).to(dtype)[:, :num_in]  # strided
    results = [
        ops.linear(x, ops.pack_linear(weight, bias, GATED_SILU if is_gated else NO_ACTIVATION))
        for ops in (TritonOps(90), ReferenceOps())
    ]
    check_close(*results)


@pytest.mark.parametrize(
    ("form", "seed"), some_pairs(["float", "int8", "fp8 blocks", "int4", "int4 act-order"], range(8), 8)
)
def test_fused_moe_is_the_references(seed: int, form: str) -> None:
    rng = random.Random(f"{seed} {form}")
    torch.manual_seed(rng.getrandbits(32))
    dtype = rng.choice(list(TOLERANCES))
    num_experts = rng.choice([1, 5, 8, 33])
    top_k, is_normalized = rng.randint(1, min(num_experts, 8)), rng.random() < 0.5
    num_tokens, hidden, inner = rng.choice([0, 1, 5, 40]), rng.choice([24, 64, 100]), rng.choice([10, 32, 56])

    def draw(num_out: int, num_in: int) -> Weight:
        if form == "float":
            return (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
        return random_weight(rng, form, num_out, num_in, dtype)

    gate_up, down = ([draw(*shape) for _ in range(num_experts)] for shape in ((2 * inner, hidden), (hidden, inner)))
    x, scores = torch.randn(num_tokens, hidden).to(dtype), torch.randn(num_tokens, num_experts).to(dtype)
    biases, activation = None, GATED_SILU
    if seed % 2:
        biases = torch.randn(num_experts, 2 * inner).to(dtype), torch.randn(num_experts, hidden).to(dtype)
        activation = Activation("swiglu_clamped", True, 0.75)
    results = [
        ops.fused_moe(
            x, scores, ops.pack_experts(gate_up, down, biases, activation), Routing(top_k, is_normalized=is_normalized)
        )
        for ops in (TritonOps(90), ReferenceOps())
    ]
    check_close(*results)


ROUTINGS = [  # of 24 experts
    Routing(1),
    Routing(6, is_normalized=True),
    Routing(6, is_normalized=True, expert_scales=torch.linspace(0.5, 2.0, 24)),
    Routing(6, "sigmoid", is_normalized=True, scale=2.5),
    Routing(5, "softmax_of_chosen"),
    Routing(5, "softmax", torch.linspace(-0.1, 0.1, 24), is_normalized=True),
    Routing(5, "softmax_of_chosen", torch.linspace(3.0, -3.0, 24)),
    Routing(6, "softmax", None, 6, 2, scale=16.0),
    Routing(6, "sigmoid", torch.linspace(-0.2, 0.2, 24), 4, 2, "top2", is_normalized=True),
    Routing(2, "sigmoid", torch.linspace(1.0, -1.0, 24), 3, 1, "top2"),
]


SHAPES = [(0, 24, 6), (3, 1, 1), (30, 60, 4), (1, 128, 8)]  # tokens, experts, of which each token chooses


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "routing"),
    [(9, 24, routing) for routing in ROUTINGS]
    + [(tokens, experts, Routing(top_k, is_normalized=True)) for tokens, experts, top_k in SHAPES],
)
def test_experts_are_routed_and_listed_by_their_scores(num_tokens: int, num_experts: int, routing: Routing) -> None:
    torch.manual_seed(routing.top_k)
    scores = torch.randn(num_tokens, num_experts) * 3
    weights, experts = route(scores, routing)
    wanted_weights, wanted = reference_route(scores, routing)
    assert torch.equal(experts.long(), wanted)
    torch.testing.assert_close(weights, wanted_weights, atol=1e-6, rtol=1e-5)
    check_lists(experts, scores.shape[1])


def check_lists(experts: torch.Tensor, num_experts: int) -> None:
    lists = list_rows(experts, num_experts)
    for expert in range(num_experts):
        found = lists.rows[expert, : int(lists.counts[expert])] if len(experts) else torch.empty(0)
        assert found.tolist() == (experts.flatten() == expert).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("num_tokens", [CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, CHUNK])
def test_lists_continue_across_chunks(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    check_lists(torch.rand(num_tokens, 7, generator=generator).argsort(dim=1)[:, :4].int(), 7)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "routing",
    [
        Routing(4, is_normalized=True),
        Routing(4, "softmax_of_chosen"),
        Routing(4, "sigmoid", torch.tensor([0.0, -5, 0, 0, 0, 0]), 3, 2, "top2"),
    ],
)
def test_overflowed_scores_give_distinct_valid_experts(routing: Routing) -> None:
    scores = torch.tensor([[torch.nan] * 6, [torch.inf, torch.nan, 1, -torch.inf, torch.inf, 0], [1, 2, 3, 4, 5, 6.0]])
    weights, experts = route(scores, routing)
    for row in experts.tolist():
        assert len(set(row)) == 4 and 0 <= min(row) <= max(row) < 6
    assert experts[2].tolist() == [5, 4, 3, 2] and weights[2].isfinite().all()
