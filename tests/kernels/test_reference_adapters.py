"""Updates of adapters in plain torch equal the products of their matrices, and change no other token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.batch_invariant import BatchInvariantOps
from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    LowRankPart,
    LowRankUpdate,
    Routing,
)
from tokenloom.kernels.reference import ReferenceOps

SLOTS = torch.tensor([0, 2, 1, 0, 3, 2, 1], dtype=torch.int32)  # slot 3 stays empty
HIDDEN = 24


def update_of(
    sizes: list[int], num_inputs: int, seed: int, has_scale: bool = False, first: int = 0, rank: int = 3
) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for size in sizes:
        a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, num_inputs), (size, rank)))
        parts.append(LowRankPart(first, a, b))
        first += size
    return LowRankUpdate(parts, torch.rand(first, generator=generator) + 0.5 if has_scale else None)


def dense(update: LowRankUpdate, shape: torch.Size) -> Tensor:
    matrix = torch.zeros(shape)
    for part in update.parts:
        matrix[part.first_output : part.first_output + len(part.b)] += part.b @ part.a
    return matrix


@pytest.mark.parametrize("activation", [NO_ACTIVATION, GATED_SILU, Activation("clamp", limit=0.5)])
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_token_gets_the_update_of_its_slot(activation: Activation, has_scale: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    ops, weight, bias, x = ReferenceOps(), torch.randn(40, HIDDEN), torch.randn(40), torch.randn(7, HIDDEN)
    space = ops.adapter_space(3, 8)
    packed = ops.pack_linear(weight, bias if has_bias else None, activation)
    slots = space.attach(packed, 2)
    base = ops.linear(x, packed)
    updates = {1: update_of([20, 12], HIDDEN, 1, has_scale, 8), 2: update_of([40], HIDDEN, 2, has_scale)}
    for slot, update in updates.items():
        slots.fill(slot, update)
    space.begin_step(SLOTS)
    outputs = ops.linear(x, packed)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot not in updates:
            assert torch.equal(outputs[token], base[token])
            continue
        update = updates[slot]
        wanted = (weight + dense(update, weight.shape)) @ x[token]
        if update.scale is not None:
            wanted *= update.scale
        wanted = ops.activate((wanted + bias if has_bias else wanted)[None], activation)[0]
        torch.testing.assert_close(outputs[token], wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(outputs[token], base[token], atol=1e-2)
    space.choose_tokens(torch.tensor([1, 4]))
    torch.testing.assert_close(ops.logits(x[[1, 4]], packed), outputs[[1, 4]], rtol=1e-5, atol=1e-5)
    space.choose_tokens(torch.tensor([2]))
    torch.testing.assert_close(ops.logits(x[2:3], packed), outputs[2:3], rtol=1e-5, atol=1e-5)
    slots.fill(2, None)
    space.begin_step(SLOTS)
    assert torch.equal(ops.linear(x, packed)[1], base[1])
    space.begin_step(None)
    assert torch.equal(ops.linear(x, packed), base)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_update_of_the_embedding_changes_look_ups_alone(is_tied: bool) -> None:
    torch.manual_seed(0)
    ops, table = ReferenceOps(), torch.randn(10, HIDDEN)
    space = ops.adapter_space(3, 8)
    packed = ops.pack_linear(table, None) if is_tied else table
    slots = space.attach_embedding(packed, 5)
    if is_tied:
        space.attach(packed, 1)
    ids = torch.tensor([5, 6, 14, 15, 4, 15, 7])  # of this rank: [5, 15)
    base = ops.embedding(ids, packed, 5)
    updates = {slot: update_of([HIDDEN], 10, slot) for slot in (1, 2)}
    for slot, update in updates.items():
        slots.fill(slot, update)
    space.begin_step(SLOTS)
    outputs = ops.embedding(ids, packed, 5)
    for token, slot in enumerate(SLOTS.tolist()):
        wanted = base[token].clone()
        if slot in updates and 5 <= ids[token] < 15:
            wanted += dense(updates[slot], torch.Size((HIDDEN, 10)))[:, ids[token] - 5]
        torch.testing.assert_close(outputs[token], wanted)
    assert not outputs[5].any(), "another rank's id"
    if is_tied:
        x = torch.randn(7, HIDDEN)
        assert torch.equal(ops.linear(x, packed), x @ table.T)


def test_experts_get_the_updates_of_their_tokens() -> None:
    torch.manual_seed(0)
    ops, size = ReferenceOps(), 16
    ups, downs = torch.randn(4, 2 * size, HIDDEN) / 5, torch.randn(4, HIDDEN, size) / 4
    x, scores, routing = torch.randn(7, HIDDEN), torch.randn(7, 4), Routing(2, "softmax")
    space = ops.adapter_space(3, 8)
    packed = ops.pack_experts(list(ups), list(downs))
    slots = space.attach_experts(packed, 2)
    base = ops.fused_moe(x, scores, packed, routing)
    chosen = {
        slot: (
            [update_of([size, size], HIDDEN, 10 * slot + expert) if expert else None for expert in range(4)],
            [update_of([HIDDEN], size, 10 * slot + 5 + expert) for expert in range(4)],
        )
        for slot in (1, 2)
    }
    for slot, (up_updates, down_updates) in chosen.items():
        slots.fill(slot, up_updates, down_updates)
    space.begin_step(SLOTS)
    outputs = ops.fused_moe(x, scores, packed, routing)
    for slot, (up_updates, down_updates) in chosen.items():
        merged = (
            [w if u is None else w + dense(u, w.shape) for w, u in zip(ups, up_updates, strict=True)],
            [w if u is None else w + dense(u, w.shape) for w, u in zip(downs, down_updates, strict=True)],
        )
        plain = ReferenceOps()
        wanted = plain.fused_moe(x, scores, plain.pack_experts(*merged), routing)
        tokens = slot == SLOTS
        torch.testing.assert_close(outputs[tokens], wanted[tokens], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(outputs[tokens], base[tokens], atol=1e-2)
    assert torch.equal(outputs[SLOTS == 0], base[SLOTS == 0]) and torch.equal(outputs[SLOTS == 3], base[SLOTS == 3])
    slots.fill(1, [], [])
    assert torch.equal(ops.fused_moe(x, scores, packed, routing)[SLOTS == 1], base[SLOTS == 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_alone_has_the_bits_that_it_has_in_a_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops, x = BatchInvariantOps(), torch.randn(7, HIDDEN).to(dtype)
    space = ops.adapter_space(3, 8)
    packed = ops.pack_linear(torch.randn(40, HIDDEN).to(dtype), torch.randn(40).to(dtype), GATED_SILU)
    slots = space.attach(packed, 2)
    for slot in (1, 2):
        slots.fill(slot, update_of([20, 20], HIDDEN, slot, has_scale=slot == 2))
    space.begin_step(SLOTS)
    together = ops.linear(x, packed)
    for token in range(len(x)):
        space.begin_step(SLOTS[token : token + 1])
        assert torch.equal(ops.linear(x[token : token + 1], packed)[0], together[token])
    space.begin_step(SLOTS[:0])
    assert len(ops.linear(x[:0], packed)) == 0


def test_the_bytes_count_every_slot_at_the_highest_rank() -> None:
    ops = ReferenceOps()
    space = ops.adapter_space(5, 8)
    space.attach(ops.pack_linear(torch.zeros(40, HIDDEN), None), 3)
    assert space.nbytes == 5 * 4 * (8 * (3 * HIDDEN + 40) + 40)
