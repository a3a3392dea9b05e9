"""Adapters' updates by the C kernels against float64, and the independence of a row from all others, at every
instruction level."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    LinearSlots,
    LowRankPart,
    LowRankUpdate,
    PackedLinear,
    Routing,
)
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.low_rank import CpuAdapterSpace
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import BF16_EPS
from tokenloom.tests.support.today import some, some_pairs

NUM_SLOTS = 6
RANKS = (1, 8, 16, 64, 100)  # of the slots; the last has none
CLAMP, CLAMPED = Activation("clamp", limit=0.7), Activation("swiglu_clamped", is_gated=True, limit=0.7)
LAYERS = [  # inputs, outputs of each part (gates, ups), activation, bias, scale; 72 + 40: cuts within pairs and tiles
    (130, (72, 40, 88), NO_ACTIVATION, False, False),
    (64, (33, 15, 16, 1), NO_ACTIVATION, True, True),
    (96, (50, 50), GATED_SILU, True, False),
    (33, (64, 64), CLAMPED, True, True),
    (100, (37,), CLAMP, True, True),
    (32, (8, 8), Activation("gelu_tanh"), False, False),
]


def draw_update(rank: int, num_inputs: int, outputs: tuple[int, ...], has_scale: bool = False) -> LowRankUpdate:
    """Draw parts whose sums have about the deviation of the inputs; with several outputs one part may be missing."""
    firsts = [sum(outputs[:part]) for part in range(len(outputs))]
    parts = [
        LowRankPart(first, torch.randn(rank, num_inputs) / num_inputs**0.5, torch.randn(count, rank) / rank**0.5)
        for first, count in zip(firsts, outputs, strict=True)
    ]
    if len(parts) > 2:
        del parts[rank % len(parts)]
    return LowRankUpdate(parts, torch.rand(sum(outputs)) + 0.5 if has_scale else None)


class Layer:
    """A random layer with slots, and its outputs in float64."""

    def __init__(
        self, ops: CpuOps, num_inputs: int, outputs: tuple[int, ...], activation: Activation, bias: bool, scale: bool
    ) -> None:
        self.ops, self.activation = ops, activation
        self.weight = (torch.randn(sum(outputs), num_inputs) / num_inputs**0.5).to(ops.dtype)
        self.bias = torch.randn(sum(outputs)).to(ops.dtype) if bias else None
        self.packed = ops.pack_linear(self.weight, self.bias, activation)
        self.space = ops.adapter_space(NUM_SLOTS, max(RANKS))
        self.slots = self.space.attach(self.packed, len(outputs))
        self.updates = [draw_update(rank, num_inputs, outputs, scale) for rank in RANKS]
        for slot, update in enumerate(self.updates, start=1):
            self.slots.fill(slot, update)

    def run(self, x: Tensor, token_slots: list[int] | None) -> Tensor:
        self.space.begin_step(None if token_slots is None else torch.tensor(token_slots, dtype=torch.int32))
        return self.ops.linear(x, self.packed)

    def expected(self, x: Tensor, token_slots: list[int]) -> Tensor:
        """Compute [T, out] in float64, with matrices as the element type rounds them."""
        sums = x.double() @ self.weight.double().T
        for row, slot in enumerate(token_slots):
            update = self.updates[slot - 1] if 1 <= slot <= len(self.updates) else LowRankUpdate(())
            sums[row] = updated(sums[row], x[row], update, self.ops.dtype)
        sums += 0 if self.bias is None else self.bias.double()
        return ReferenceOps().activate(sums, self.activation)


def updated(base: Tensor, x: Tensor, update: LowRankUpdate, dtype: torch.dtype) -> Tensor:
    """Compute scale * (base + B A x) of one row in float64."""
    sums = base.clone()
    for part in update.parts:
        a, b = part.a.to(dtype).double(), part.b.to(dtype).double()
        sums[part.first_output : part.first_output + len(b)] += b @ (a @ x.double())
    return sums if update.scale is None else sums * update.scale.double()


def close(answer: Tensor, exact: Tensor) -> bool:
    """Whether the numbers, of about the deviation 1, agree; in bf16 A x is rounded too."""
    error = (answer.double() - exact).abs()
    is_bf16 = answer.dtype == torch.bfloat16
    return bool((error <= exact.abs() * (BF16_EPS if is_bf16 else 1e-5) + (0.02 if is_bf16 else 2e-5)).all())


def mixed_slots(num_rows: int, seed: int = 0) -> list[int]:
    """Return slots with short and long runs of equal ones; some 0, some without an update."""
    draw, slots = random.Random(seed), list[int]()
    while len(slots) < num_rows:
        slots += [draw.randint(0, NUM_SLOTS)] * draw.choice([1, 1, 2, 5, 20])
    return slots[:num_rows]


@pytest.mark.parametrize(("number", "num_rows"), some_pairs(range(len(LAYERS)), [1, 3, 32, 77], 4))
def test_outputs_have_the_updates_of_their_slots(ops: CpuOps, number: int, num_rows: int) -> None:
    torch.manual_seed(number)
    layer = Layer(ops, *LAYERS[number])
    x = torch.randn(num_rows, LAYERS[number][0] + 3).to(ops.dtype)[:, :-3]
    slots = mixed_slots(num_rows, number)
    assert close(layer.run(x, slots), layer.expected(x, slots))
    slots = [5] * num_rows
    assert close(layer.run(x, slots), layer.expected(x, slots))
    base = layer.expected(x, [0] * num_rows)
    assert (layer.expected(x, slots) - base).abs().max() > 0.3, "the update would not be missed"


@pytest.mark.parametrize("number", some(range(len(LAYERS)), 3))
def test_a_row_has_the_same_bits_alone_in_a_mix_and_in_any_order(ops: CpuOps, number: int) -> None:
    torch.manual_seed(number)
    layer, num_rows = Layer(ops, *LAYERS[number]), 77
    x, slots = torch.randn(num_rows, LAYERS[number][0]).to(ops.dtype), mixed_slots(num_rows, number)
    together, base = layer.run(x, slots), layer.run(x, None)
    for row, slot in enumerate(slots):
        assert torch.equal(layer.run(x[row : row + 1], [slot])[0], together[row])
        if slot in (0, NUM_SLOTS):
            assert torch.equal(together[row], base[row])
        elif layer.activation.kind not in ("clamp", "swiglu_clamped"):
            assert not torch.equal(together[row], base[row])
    order = torch.randperm(num_rows)
    assert torch.equal(layer.run(x[order], [slots[row] for row in order]), together[order])
    for slot in (1, 4):
        same = [row for row in range(num_rows) if slots[row] == slot]
        assert torch.equal(layer.run(x[same], [slot] * len(same)), together[same])


def test_a_step_without_adapters_has_the_bits_of_a_layer_without_slots(ops: CpuOps) -> None:
    layer = Layer(ops, *LAYERS[0])
    x = torch.randn(40, LAYERS[0][0]).to(ops.dtype)
    plain = ops.linear(x, ops.pack_linear(layer.weight, None))
    assert torch.equal(layer.run(x, None), plain) and torch.equal(layer.run(x, [0] * 40), plain)


@pytest.mark.parametrize("num_rows", [1, 5, 77])
def test_threads_do_not_change_a_bit(ops: CpuOps, num_rows: int, num_threads: Callable[[int], None]) -> None:
    """Most of 16 threads arrive after the early pieces are taken, or after the stage has ended."""
    layer = Layer(ops, *LAYERS[0])
    x, slots = torch.randn(num_rows, LAYERS[0][0]).to(ops.dtype), mixed_slots(num_rows)
    slots[0] = 4
    answers = []
    for count in (1, 2, 3, 16):
        num_threads(count)
        answers += [layer.run(x, slots) for _ in range(10)]
    assert all(torch.equal(answer, answers[0]) for answer in answers[1:])


def test_no_rows_are_legal(ops: CpuOps) -> None:
    assert Layer(ops, *LAYERS[0]).run(torch.randn(0, LAYERS[0][0]).to(ops.dtype), []).shape == (0, 200)


def test_a_slot_is_filled_again_between_steps(ops: CpuOps) -> None:
    """With another rank, with other outputs, with none, and with a larger rank than any before."""
    num_inputs, outputs, *_ = LAYERS[0]
    layer = Layer(ops, *LAYERS[0])
    x, slots = torch.randn(9, num_inputs).to(ops.dtype), [2, 0, 2, 1, 2, 3, 2, 5, 2]
    before = layer.run(x, slots)
    for rank in (3, 40, 16, 200):
        layer.updates[1] = replace(draw_update(rank, num_inputs, outputs), scale=torch.rand(200) + 0.5)
        layer.slots.fill(2, layer.updates[1])
        answer = layer.run(x, slots)
        assert close(answer, layer.expected(x, slots))
        assert torch.equal(answer[1::2], before[1::2])
    for empty in (None, LowRankUpdate(())):
        layer.slots.fill(2, empty)
        assert torch.equal(layer.run(x, slots)[::2], layer.run(x, None)[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_part_of_any_type_has_the_bits_of_its_float32(ops: CpuOps, dtype: torch.dtype) -> None:
    layer = Layer(ops, *LAYERS[0])
    layer.slots.fill(2, None)
    x = torch.randn(3, LAYERS[0][0]).to(ops.dtype)
    update = draw_update(7, LAYERS[0][0], LAYERS[0][1])
    parts = [replace(part, a=part.a.to(dtype), b=part.b.to(dtype), factor=1 / 3) for part in update.parts]
    floats = [replace(part, a=part.a.float(), b=part.scaled_b, factor=1.0) for part in parts]
    answers = []
    for each in (parts, floats):
        layer.slots.fill(1, LowRankUpdate(each))
        answers.append(layer.run(x, [1, 2, 1]))
    assert torch.equal(*answers) and not torch.equal(answers[0][0], answers[0][1])


@pytest.mark.parametrize("slot", [-1, 0, NUM_SLOTS + 1])
def test_other_slots_cannot_be_filled(ops: CpuOps, slot: int) -> None:
    layer = Layer(ops, *LAYERS[0])
    with pytest.raises(ValueError, match=f"no slot {slot}"):
        layer.slots.fill(slot, layer.updates[0])


def test_slots_are_filled_while_steps_of_other_slots_run(ops: CpuOps) -> None:
    num_inputs, outputs, *_ = LAYERS[0]
    layer, is_over = Layer(ops, *LAYERS[0]), threading.Event()
    x = torch.randn(33, num_inputs).to(ops.dtype)
    updates = [draw_update(rank, num_inputs, outputs) for rank in (5, 150, 300)]
    expected = layer.run(x, [1, 0, 4] * 11)

    def fill(slot: int) -> None:
        number = 0
        while not is_over.is_set():
            layer.slots.fill(slot, [*updates, None][number % 4])
            number += 1

    threads = [threading.Thread(target=fill, args=(slot,)) for slot in (2, 3)]
    for thread in threads:
        thread.start()
    try:
        answers = [layer.run(x, [1, 0, 4] * 11) for _ in range(100)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join(10)
    assert all(torch.equal(answer, expected) for answer in answers)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_a_slot_that_is_filled_again_and_again_does_not_grow(ops: CpuOps) -> None:
    layer = ops.pack_linear(torch.randn(1024, 1024).to(ops.dtype), None)
    updates = [draw_update(rank, 1024, (1024,)) for rank in (128, 256, 192)]
    slots = ops.adapter_space(2, 256).attach(layer, 1)
    for number in range(10):
        slots.fill(1, updates[number % 3])
    before = resident_bytes()
    for number in range(100):  # half a MiB at least
        slots.fill(1, updates[number % 3])
    assert resident_bytes() - before < 20 << 20


def test_the_space_counts_the_largest_updates_of_all_slots(ops: CpuOps) -> None:
    """By rank, in elements of the model: A and B of each slot, with some room for layouts."""
    space = ops.adapter_space(4, 64)
    space.attach(ops.pack_linear(torch.randn(512, 256).to(ops.dtype), None), 2)
    space.attach_embedding(torch.randn(100, 256).to(ops.dtype), 0)
    num_elements = 64 * (2 * 256 + 512) + 64 * (100 + 256)
    smallest = 4 * num_elements * (2 if ops.dtype == torch.bfloat16 else 4)
    assert smallest <= space.nbytes < 1.2 * smallest


# ── embeddings and heads ────────────────────────────────────────────────────────────────────────────────────────────


class Vocabulary:
    """A tied table [50, 72] with slots for look-ups and for the head."""

    def __init__(self, ops: CpuOps, is_tied: bool) -> None:
        self.ops = ops
        self.weight = torch.randn(50, 72).to(ops.dtype)
        self.head = ops.pack_linear(self.weight / 8, None)
        self.table: Tensor | PackedLinear = ops.pack_linear(self.weight, None) if is_tied else self.weight
        self.space = ops.adapter_space(NUM_SLOTS, max(RANKS))
        lookups, heads = self.space.attach_embedding(self.table, 7), self.space.attach(self.head, 1)
        self.lookups = [draw_update(rank, 50, (72,)) for rank in RANKS]
        self.heads = [draw_update(rank, 72, (50,)) for rank in RANKS]
        for slots, updates in ((lookups, self.lookups), (heads, self.heads)):
            self.fill(slots, updates)

    @staticmethod
    def fill(slots: LinearSlots, updates: list[LowRankUpdate]) -> None:
        for slot, update in enumerate(updates, start=1):
            slots.fill(slot, update)


@pytest.mark.parametrize("is_tied", [True, False])
def test_looked_up_rows_have_the_updates_of_their_slots(ops: CpuOps, is_tied: bool) -> None:
    """The first id of this rank is 7; ids of other ranks get zeros from all slots."""
    torch.manual_seed(1)
    vocabulary, ids = Vocabulary(ops, is_tied), torch.arange(77)
    slots = mixed_slots(77)
    vocabulary.space.begin_step(torch.tensor(slots, dtype=torch.int32))
    rows = ops.embedding(ids, vocabulary.table, 7)
    for row, (token_id, slot) in enumerate(zip(range(-7, 70), slots, strict=True)):
        if not 0 <= token_id < 50:
            assert not rows[row].any()
            continue
        expected = vocabulary.weight[token_id].double()
        if 1 <= slot <= len(RANKS):
            base = expected
            one = torch.zeros(50).index_fill(0, torch.tensor([token_id]), 1)
            expected = updated(base, one, vocabulary.lookups[slot - 1], ops.dtype)
            assert not torch.equal(rows[row].double(), base)
        assert close(rows[row], expected)
    for row in (0, 20, 40, 56):
        vocabulary.space.begin_step(torch.tensor(slots[row : row + 1], dtype=torch.int32))
        assert torch.equal(ops.embedding(ids[row : row + 1], vocabulary.table, 7)[0], rows[row])


def test_chosen_tokens_keep_their_slots(ops: CpuOps) -> None:
    """choose_tokens counts from the step's tokens, not from those that were chosen before."""
    vocabulary, x = Vocabulary(ops, False), torch.randn(40, 72).to(ops.dtype)
    slots = torch.tensor(mixed_slots(40), dtype=torch.int32)
    vocabulary.space.begin_step(slots)
    every = ops.logits(x, vocabulary.head)
    for indices in ([39], [7, 30, 7, 0], [], list(range(40))):
        chosen = torch.tensor(indices, dtype=torch.int64)
        vocabulary.space.choose_tokens(chosen)
        assert torch.equal(ops.logits(x[chosen], vocabulary.head), every[chosen])
    for row in range(40):
        base = x[row].double() @ (vocabulary.weight / 8).double().T
        slot = int(slots[row])
        update = vocabulary.heads[slot - 1] if 1 <= slot <= len(RANKS) else LowRankUpdate(())
        error = every[row].double() - updated(base, x[row], update, ops.dtype)
        assert error.abs().max() < (0.02 if ops.dtype == torch.bfloat16 else 2e-5)
    vocabulary.space.begin_step(None)
    assert torch.equal(ops.logits(x[slots == 0], vocabulary.head), every[slots == 0])


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Experts:
    """Random experts with slots: 5 of 96 inputs and 40 inner units, of which a token chooses 2."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops, numbers = ops, range(5)
        self.ups = torch.randn(5, 80, 96).div(96**0.5).to(ops.dtype)
        self.downs = torch.randn(5, 96, 40).div(40**0.5).to(ops.dtype)
        self.packed = ops.pack_experts(list(self.ups), list(self.downs))
        self.space = ops.adapter_space(NUM_SLOTS, max(RANKS))
        slots = self.space.attach_experts(self.packed, 2)
        self.of_ups = [[draw_update(rank, 96, (40, 40)) for _ in numbers] for rank in RANKS]
        self.of_downs = [[draw_update(rank, 40, (96,)) for _ in numbers] for rank in RANKS]
        for slot, updates in enumerate(zip(self.of_ups, self.of_downs, strict=True), start=1):
            slots.fill(slot, *updates)
        slots.fill(NUM_SLOTS, self.of_ups[0], [])
        slots.fill(NUM_SLOTS, [], [])

    def run(self, x: Tensor, scores: Tensor, token_slots: list[int] | None) -> Tensor:
        self.space.begin_step(None if token_slots is None else torch.tensor(token_slots, dtype=torch.int32))
        return self.ops.fused_moe(x, scores, self.packed, Routing(2))

    def expected(self, x: Tensor, scores: Tensor, slot: int) -> Tensor:
        """Compute one token in float64."""
        total, weights = torch.zeros(96, dtype=torch.float64), scores.double().softmax(-1)
        for expert in scores.topk(2).indices.tolist():
            none = LowRankUpdate(())
            up = self.of_ups[slot - 1][expert] if 1 <= slot <= len(RANKS) else none
            down = self.of_downs[slot - 1][expert] if 1 <= slot <= len(RANKS) else none
            inner = updated(self.ups[expert].double() @ x.double(), x, up, self.ops.dtype)
            inner = ReferenceOps().activate(inner, GATED_SILU)
            total += weights[expert] * updated(self.downs[expert].double() @ inner, inner, down, self.ops.dtype)
        return total


@pytest.mark.parametrize("num_tokens", some([1, 2, 40, 130], 2))
def test_tokens_of_experts_have_the_updates_of_their_slots(ops: CpuOps, num_tokens: int) -> None:
    """Expert 3 has all tokens, and reads the layer's input itself."""
    torch.manual_seed(num_tokens)
    experts, slots = Experts(ops), mixed_slots(num_tokens, num_tokens)
    x, scores = torch.randn(num_tokens, 96).to(ops.dtype), torch.randn(num_tokens, 5)
    scores[:, 3] = 9
    answer, base = experts.run(x, scores, slots), experts.run(x, scores, None)
    for token, slot in enumerate(slots):
        error = answer[token].double() - experts.expected(x[token], scores[token], slot)
        assert error.abs().max() < (0.1 if ops.dtype == torch.bfloat16 else 1e-4)
        if slot in (0, NUM_SLOTS):
            assert torch.equal(answer[token], base[token])
        if token % 7 == 0:
            one = slice(token, token + 1)
            assert torch.equal(experts.run(x[one], scores[one], [slot])[0], answer[token])


def test_a_space_of_the_kernels_is_theirs(ops: CpuOps) -> None:
    assert isinstance(ops.adapter_space(3, 8), CpuAdapterSpace) and ops.adapter_space(3, 8).num_slots == 3
