"""Updates of adapters in Triton against plain torch, and their bits alone and in any mix, in the interpreter.

Tolerances, relative to the largest element: float32 1e-5; float16 4e-3 (the kernels round the matrices of adapters to
it).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    BatchColumns,
    LowRankPart,
    LowRankUpdate,
    Routing,
)
from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.linear.adapter_rows import ROWS, list_slots
from tokenloom.kernels.gpu.linear.low_rank import MIN_SPLIT, inner_like, shrink
from tokenloom.kernels.gpu.linear.moe import list_rows
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.quantized import quantize
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.gpu.test_matmul import TOLERANCES, check_close
from tokenloom.tests.kernels.gpu.test_step import unwritten
from tokenloom.tests.support.today import some

NUM_SLOTS = 4  # of which the last stays empty
TWO_SPLITS = MIN_SPLIT + 20  # inputs
RANKS = (1, 8, 16, 64, 100)
ACTIVATIONS = (NO_ACTIVATION, Activation("gelu"), GATED_SILU, Activation("swiglu_clamped", True, 0.75))


def random_part(rng: random.Random, first: int, size: int, num_inputs: int, rank: int = 0) -> LowRankPart:
    """Make a part as large as weights of deviation 1 / sqrt(num_inputs)."""
    rank = rank or rng.choice(RANKS)
    return LowRankPart(first, torch.randn(rank, num_inputs) / num_inputs**0.5, torch.randn(size, rank) / rank**0.5)


def random_update(
    rng: random.Random, num_outputs: int, num_inputs: int, num_parts: int, rank: int = 0
) -> LowRankUpdate:
    """Make an update of up to `num_parts` parts, with gaps between them, half of the time with a scale."""
    bounds = sorted(rng.sample(range(num_outputs + 1), 2 * rng.randint(1, num_parts)))
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    parts = [random_part(rng, first, end - first, num_inputs, rank) for first, end in pairs]
    return LowRankUpdate(parts, torch.rand(num_outputs) + 0.5 if rng.random() < 0.5 else None)


def mixed_slots(num_tokens: int) -> Tensor:
    return torch.randint(0, NUM_SLOTS + 1, (num_tokens,), dtype=torch.int32)


@pytest.mark.parametrize("num_tokens", [1, ROWS + 1, 1500])
@pytest.mark.parametrize("num_experts", [1, 7])
def test_tiles_hold_each_row_once_with_rows_of_its_slot(num_tokens: int, num_experts: int) -> None:
    torch.manual_seed(num_tokens)
    slots, top_k = mixed_slots(num_tokens), 2 if num_experts > 1 else 1
    experts = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].int()
    lists = list_slots(slots, NUM_SLOTS, list_rows(experts, num_experts) if num_experts > 1 else None)
    seen: list[int] = []
    for slot, expert, first, end in lists.tiles.tolist():
        if slot >= 0:
            assert 0 < end - first <= ROWS
            rows = lists.order[first:end].long()
            assert (slots[rows // top_k] == slot).all() and (experts.flatten()[rows] == expert).all()
            seen += rows.tolist()
    pairs = range(num_tokens * top_k)
    assert seen == sorted(pairs, key=lambda pair: (int(experts.flatten()[pair]), int(slots[pair // top_k]), pair))


@pytest.mark.parametrize(
    ("seed", "num_tokens", "form"), some(list(product(range(20), [0, 1, 40], ["float", "int8"])), 4)
)
def test_a_layer_with_adapters_is_the_references(seed: int, num_tokens: int, form: str) -> None:
    rng = random.Random(f"{seed} {num_tokens} {form}")
    torch.manual_seed(rng.getrandbits(32))
    dtype, activation = rng.choice(list(TOLERANCES)), rng.choice(ACTIVATIONS)
    num_inputs, num_outputs, num_parts = rng.choice([24, 100, 600]), 2 * rng.choice([8, 50, 70]), rng.randint(1, 3)
    plain = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    weight, bias = quantize(plain, "int8") if form == "int8" else plain, rng.choice([None, torch.randn(num_outputs)])
    updates = [random_update(rng, num_outputs, num_inputs, num_parts) for _ in range(NUM_SLOTS - 1)]
    x, slots = torch.randn(num_tokens, 2 * num_inputs).to(dtype)[:, :num_inputs], mixed_slots(num_tokens)
    results = []
    for ops in (TritonOps(90), ReferenceOps()):
        space = ops.adapter_space(NUM_SLOTS, max(RANKS))
        packed = ops.pack_linear(weight, None if bias is None else bias.to(dtype), activation)
        layer = space.attach(packed, num_parts)
        for slot, update in enumerate(updates, 1):
            layer.fill(slot, update)
        space.wait_for_fills()
        space.begin_step(slots)
        results.append(ops.linear(x, packed))
    check_close(*results)


def test_a_scale_without_parts_scales_its_rows_alone() -> None:
    ops, weight, scale = TritonOps(90), torch.randn(40, 24), torch.rand(40)
    packed, space = ops.pack_linear(weight, None), ops.adapter_space(1, 8)
    space.attach(packed, 2).fill(1, LowRankUpdate([], scale))
    space.begin_step(torch.tensor([0, 1], dtype=torch.int32))
    plain, scaled = ops.linear(torch.ones(2, 24), packed)
    check_close(plain, weight.sum(1))
    check_close(scaled, plain * scale)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("activation", [NO_ACTIVATION, GATED_SILU])
def test_a_row_has_the_same_bits_alone_and_in_any_mix_and_order(activation: Activation) -> None:
    torch.manual_seed(0)
    ops, rng, weight = BatchInvariantTritonOps(90), random.Random(0), torch.randn(40, TWO_SPLITS) / TWO_SPLITS**0.5
    packed, space = ops.pack_linear(weight, torch.randn(40), activation), ops.adapter_space(NUM_SLOTS, max(RANKS))
    layer = space.attach(packed, 2)
    for slot in range(1, NUM_SLOTS):
        layer.fill(slot, random_update(rng, 40, TWO_SPLITS, 2))
    x, slots = torch.randn(20, TWO_SPLITS), mixed_slots(20)

    def run(rows: Sequence[int]) -> Tensor:
        space.begin_step(slots[list(rows)])
        return ops.linear(x[list(rows)], packed)

    together = run(range(20))
    for rows in ([0], [17, 3], list(range(19, 5, -1))):
        assert torch.equal(run(rows), together[rows])


@pytest.mark.usefixtures("in_order")
def test_a_row_has_the_same_bits_in_steps_of_many_rows() -> None:
    """Their programs sum the parts of the inputs that others store."""
    num_inputs = TWO_SPLITS + MIN_SPLIT  # of two parts, any order gives the same sum
    ops, rank, x = BatchInvariantTritonOps(90), 8, torch.randn(9, num_inputs)
    layer = ops.adapter_space(1, rank).attach(ops.pack_linear(torch.randn(40, num_inputs), None), 1)
    layer.fill(1, LowRankUpdate([random_part(random.Random(0), 0, 40, num_inputs, rank)]))
    tiles = list_slots(torch.ones(9, dtype=torch.int32), 1)
    first, second, third = shrink(x, layer.matrices, tiles, inner_like(x, layer.matrices, tiles, many_rows=9))
    (whole,) = shrink(x, layer.matrices, tiles, inner_like(x, layer.matrices, tiles, many_rows=8))
    assert torch.equal(((first + second) + third)[:, :rank], whole[:, :rank]) and whole[:, :rank].any()


@pytest.mark.parametrize(("form", "num_tokens"), [("float", 1), ("int8", 1), ("int8", 3)])
def test_outputs_of_our_kernels_are_rounded_after_the_update(form: str, num_tokens: int) -> None:
    """float16 holds 1000.25 as 1000."""
    ops, weight = TritonOps(90), torch.ones(1, 2, dtype=torch.float16)
    packed, space = (
        ops.pack_linear(quantize(weight, "int8") if form == "int8" else weight, None),
        ops.adapter_space(1, 1),
    )
    space.attach(packed, 1).fill(1, LowRankUpdate([LowRankPart(0, torch.tensor([[-1.0, 0.0]]), torch.ones(1, 1))]))
    space.begin_step(torch.ones(num_tokens, dtype=torch.int32))
    x = torch.tensor([[1000.0, 0.25]] * num_tokens, dtype=torch.float16)
    assert ops.linear(x, packed).tolist() == [[0.25]] * num_tokens


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(("num_tokens", "form"), [(1, "float"), (4, "int8")])
def test_experts_with_adapters_are_the_references_and_tokens_are_independent(form: str, num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    torch.manual_seed(num_tokens)
    num_experts, hidden, inner, routing = 4, 40, 24, Routing(2, is_normalized=True)
    shapes = ((2 * inner, hidden), (hidden, inner))
    plain = [[torch.randn(*shape) / 7 for _ in range(num_experts)] for shape in shapes]
    gate_up, down = ([quantize(w, "int8") for w in weights] if form == "int8" else weights for weights in plain)
    biases = torch.randn(num_experts, 2 * inner), torch.randn(num_experts, hidden)
    fills = [
        [
            [random_update(rng, *shape, parts) for _ in range(num_experts)]
            for shape, parts in zip(shapes, (2, 1), strict=True)
        ]
        for _ in range(NUM_SLOTS - 1)
    ]
    x, scores, slots = torch.randn(num_tokens, hidden), torch.randn(num_tokens, num_experts), mixed_slots(num_tokens)
    slots[0] = 1
    reference, ops = ReferenceOps(), BatchInvariantTritonOps(90)
    results = []
    for each in (ops, reference):
        packed = each.pack_experts(gate_up, down, biases, Activation("swiglu_clamped", True, 0.75))
        space = each.adapter_space(NUM_SLOTS, max(RANKS))
        layer = space.attach_experts(packed, 2)
        base = each.fused_moe(x, scores, packed, routing)
        for slot, (ups, downs) in enumerate(fills, 1):
            layer.fill(slot, [None, *ups[1:]], downs)
        space.begin_step(slots)
        results.append(each.fused_moe(x, scores, packed, routing))
        if each is ops:
            for token in range(0, num_tokens, 2):
                space.begin_step(slots[token : token + 1])
                alone = ops.fused_moe(x[token : token + 1], scores[token : token + 1], packed, routing)[0]
                assert torch.equal(alone, results[0][token])
                assert torch.equal(alone, base[token]) == (int(slots[token]) in (0, NUM_SLOTS))
            layer.fill(1, [], [])
            space.begin_step(torch.ones_like(slots))
            assert torch.equal(ops.fused_moe(x, scores, packed, routing), base)
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_look_ups_with_adapters_are_the_references(is_tied: bool) -> None:
    torch.manual_seed(0)
    first_id, num_ids, width = 50, 40, 70
    table = torch.randn(num_ids, width)
    update = LowRankUpdate([random_part(random.Random(0), 0, width, num_ids, 20)])
    ids, slots = torch.tensor([50, 89, -3, 49, 90, -2], dtype=torch.int32), torch.tensor([1, 0, 1, 1, 1, 3]).int()
    rows = torch.tensor([2, -1, 0, 1])
    results = []
    for ops in (TritonOps(90), ReferenceOps()):
        whole = ops.pack_linear(table, None) if is_tied else table
        space = ops.adapter_space(NUM_SLOTS, 32)
        space.attach_embedding(whole, first_id).fill(1, update)
        columns = BatchColumns(
            last_tokens=torch.tensor([60, 70, 51]),
            num_computed=torch.zeros(3, dtype=torch.int32),
            block_tables=torch.ones(1, 3, 2, dtype=torch.int32),
            adapter_slots=torch.tensor([1, 0, 1, 0], dtype=torch.int32),
        )
        space.begin_step(slots)
        looked_up = [ops.embedding(ids.clamp(min=0), whole, first_id), ops.begin_step(ids, columns, whole, first_id)]
        decoded = ops.begin_decode(rows, columns, [unwritten(4, 2)], 16, whole, first_id)
        results.append([*looked_up, decoded])
        if is_tied:  # the head has no slots
            assert torch.equal(ops.logits(table[:4], whole), table[:4] @ table.T)
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert not torch.equal(results[0][2][0], table[1]) and torch.equal(results[0][2][3], table[20])


def test_the_head_updates_the_chosen_tokens_whatever_was_chosen_before() -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(90, 48), torch.randn(6, 48)
    update, slots = LowRankUpdate([random_part(random.Random(0), 0, 90, 48, 8)]), torch.tensor([0, 1, 2, 1, 0, 1]).int()
    results = []
    for ops in (TritonOps(90), ReferenceOps()):
        packed, space = ops.pack_linear(weight, None), ops.adapter_space(2, 8)
        space.attach(packed, 1).fill(1, update)
        space.begin_step(slots)
        scores = []
        for tokens in ([5], [0, 1, 3], [2]):
            index = torch.tensor(tokens)
            space.choose_tokens(index)
            scores.append(ops.logits(hidden[index], packed))
        results.append(torch.cat(scores))
    assert results[0].dtype == torch.float32
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)
    for place, token in enumerate([5, 0, 1, 3, 2]):
        assert torch.allclose(results[0][place], weight @ hidden[token], atol=1e-4) == (slots[token] != 1)


def test_a_refilled_slot_keeps_nothing_of_its_adapter_before() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    weight, x = torch.randn(40, 30), torch.randn(2, 30)
    large = LowRankUpdate([random_part(rng, 0, 20, 30, 100), random_part(rng, 20, 20, 30, 64)], torch.rand(40))
    small, slots, results = LowRankUpdate([random_part(rng, 5, 9, 30, 3)]), torch.ones(2, dtype=torch.int32), []
    for fills in ([small], [large, small], [large, None], []):
        ops = TritonOps(90)
        packed, space = ops.pack_linear(weight, None), ops.adapter_space(NUM_SLOTS, 100)
        layer = space.attach(packed, 2)
        for update in fills:
            layer.fill(1, update)
        space.begin_step(slots)
        results.append(ops.linear(x, packed))
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[3])


def test_an_update_larger_than_its_slot_is_refused_with_the_numbers() -> None:
    ops, rng = TritonOps(90), random.Random(0)
    packed, space = ops.pack_linear(torch.randn(40, 30), None), ops.adapter_space(2, 16)
    layer = space.attach(packed, 1)
    assert space.nbytes == 2 * 4 * (16 * 30 + 40 * 16 + 40 + 6)
    one = random_part(rng, 0, 20, 30, 16)
    for slot, parts, message in (
        (3, [one], r"slot 3 is filled, slots are \[1, 2\]"),
        (1, [one, random_part(rng, 20, 20, 30, 8)], "an update has 2 parts, the layer's slots hold 1"),
        (1, [random_part(rng, 0, 20, 30, 17)], "an update has rank 17, slots hold 16: raise --max-lora-rank"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.fill(slot, LowRankUpdate(parts))
