"""Adapters' updates by the C kernels against the reference, and the independence of a row from all others, at every
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


def rounded(update: LowRankUpdate | None, dtype: torch.dtype) -> LowRankUpdate | None:
    """Round the matrices as a model of this type does."""
    if update is None:
        return None
    parts = [replace(part, a=part.a.to(dtype).float(), b=part.b.to(dtype).float()) for part in update.parts]
    return LowRankUpdate(parts, update.scale)


def as_slots(token_slots: list[int] | None) -> Tensor | None:
    return None if token_slots is None else torch.tensor(token_slots, dtype=torch.int32)


class Pair:
    """The C kernels and the reference in float32, each with a space of slots."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops, self.reference = ops, ReferenceOps()
        self.space = ops.adapter_space(NUM_SLOTS, max(RANKS))
        self.reference_space = self.reference.adapter_space(NUM_SLOTS, max(RANKS))

    def fill(self, slots: tuple[LinearSlots, LinearSlots], slot: int, update: LowRankUpdate | None) -> None:
        slots[0].fill(slot, update)
        slots[1].fill(slot, rounded(update, self.ops.dtype))

    def begin_step(self, token_slots: list[int] | None) -> None:
        for space in (self.space, self.reference_space):
            space.begin_step(as_slots(token_slots))


class Layer(Pair):
    """A random layer with slots."""

    def __init__(
        self, ops: CpuOps, num_inputs: int, outputs: tuple[int, ...], activation: Activation, bias: bool, scale: bool
    ) -> None:
        super().__init__(ops)
        self.activation = activation
        self.weight = (torch.randn(sum(outputs), num_inputs) / num_inputs**0.5).to(ops.dtype)
        drawn = torch.randn(sum(outputs)).to(ops.dtype) if bias else None
        self.packed = ops.pack_linear(self.weight, drawn, activation)
        wide = None if drawn is None else drawn.float()
        self.reference_packed = self.reference.pack_linear(self.weight.float(), wide, activation)
        self.slots = self.space.attach(self.packed, len(outputs))
        self.both = self.slots, self.reference_space.attach(self.reference_packed, len(outputs))
        for slot, rank in enumerate(RANKS, start=1):
            self.fill(self.both, slot, draw_update(rank, num_inputs, outputs, scale))

    def run(self, x: Tensor, token_slots: list[int] | None) -> Tensor:
        self.begin_step(token_slots)
        return self.ops.linear(x, self.packed)

    def expected(self, x: Tensor, token_slots: list[int]) -> Tensor:
        self.begin_step(token_slots)
        return self.reference.linear(x.float(), self.reference_packed)


def close(answer: Tensor, exact: Tensor) -> bool:
    """Whether the numbers, of about the deviation 1, agree; in bf16 A x is rounded too."""
    error = (answer.float() - exact).abs()
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
        layer.fill(layer.both, 2, replace(draw_update(rank, num_inputs, outputs), scale=torch.rand(200) + 0.5))
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
        layer.slots.fill(slot, None)


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


class Vocabulary(Pair):
    """A table [50, 72] with slots for look-ups, tied or not, and a head with slots."""

    def __init__(self, ops: CpuOps, is_tied: bool) -> None:
        super().__init__(ops)
        weight = torch.randn(50, 72).to(ops.dtype)
        self.head, self.reference_head = (
            each.pack_linear((weight / 8).to(dtype), None)
            for each, dtype in ((ops, ops.dtype), (self.reference, torch.float32))
        )
        self.table: Tensor | PackedLinear = ops.pack_linear(weight, None) if is_tied else weight
        self.reference_table = weight.float()
        lookups = self.space.attach_embedding(self.table, 7), self.reference_space.attach_embedding(weight.float(), 7)
        heads = self.space.attach(self.head, 1), self.reference_space.attach(self.reference_head, 1)
        for slot, rank in enumerate(RANKS, start=1):
            self.fill(lookups, slot, draw_update(rank, 50, (72,)))
            self.fill(heads, slot, draw_update(rank, 72, (50,)))


@pytest.mark.parametrize("is_tied", [True, False])
def test_looked_up_rows_have_the_updates_of_their_slots(ops: CpuOps, is_tied: bool) -> None:
    """The first id of this rank is 7; ids of other ranks get zeros from all slots."""
    torch.manual_seed(1)
    vocabulary, ids, slots = Vocabulary(ops, is_tied), torch.arange(77), mixed_slots(77)
    vocabulary.begin_step(None)
    base = ops.embedding(ids, vocabulary.table, 7)
    vocabulary.begin_step(slots)
    rows = ops.embedding(ids, vocabulary.table, 7)
    assert close(rows, vocabulary.reference.embedding(ids, vocabulary.reference_table, 7))
    for row, slot in enumerate(slots):
        is_changed = 7 <= row < 57 and 1 <= slot <= len(RANKS)
        assert torch.equal(rows[row], base[row]) != is_changed
    assert not rows[:7].any() and not rows[57:].any()
    for row in (0, 20, 40, 56):
        vocabulary.begin_step(slots[row : row + 1])
        assert torch.equal(ops.embedding(ids[row : row + 1], vocabulary.table, 7)[0], rows[row])


def test_chosen_tokens_keep_their_slots(ops: CpuOps) -> None:
    """choose_tokens counts from the step's tokens, not from those that were chosen before."""
    vocabulary, x, slots = Vocabulary(ops, False), torch.randn(40, 72).to(ops.dtype), mixed_slots(40)
    vocabulary.begin_step(slots)
    every = ops.logits(x, vocabulary.head)
    error = every - vocabulary.reference.logits(x.float(), vocabulary.reference_head)
    assert error.abs().max() < (0.02 if ops.dtype == torch.bfloat16 else 2e-5)
    for indices in ([39], [7, 30, 7, 0], [], list(range(40))):
        chosen = torch.tensor(indices, dtype=torch.int64)
        vocabulary.space.choose_tokens(chosen)
        assert torch.equal(ops.logits(x[chosen], vocabulary.head), every[chosen])
    vocabulary.begin_step(None)
    is_plain = torch.tensor(slots) == 0
    assert torch.equal(ops.logits(x[is_plain], vocabulary.head), every[is_plain])


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Experts(Pair):
    """Random experts with slots: 5 of 96 inputs and 40 inner units, of which a token chooses 2."""

    def __init__(self, ops: CpuOps) -> None:
        super().__init__(ops)
        ups = torch.randn(5, 80, 96).div(96**0.5).to(ops.dtype)
        downs = torch.randn(5, 96, 40).div(40**0.5).to(ops.dtype)
        self.packed = ops.pack_experts(list(ups), list(downs))
        self.reference_packed = self.reference.pack_experts(list(ups.float()), list(downs.float()))
        slots = self.space.attach_experts(self.packed, 2)
        reference_slots = self.reference_space.attach_experts(self.reference_packed, 2)
        for slot, rank in enumerate(RANKS, start=1):
            of_ups = [draw_update(rank, 96, (40, 40)) for _ in range(5)]
            of_downs = [draw_update(rank, 40, (96,)) for _ in range(5)]
            slots.fill(slot, of_ups, of_downs)
            reference_slots.fill(slot, *([rounded(each, ops.dtype) for each in all] for all in (of_ups, of_downs)))
        slots.fill(NUM_SLOTS, of_ups, [])
        slots.fill(NUM_SLOTS, [], [])

    def run(self, x: Tensor, scores: Tensor, token_slots: list[int] | None) -> Tensor:
        self.begin_step(token_slots)
        return self.ops.fused_moe(x, scores, self.packed, Routing(2))


@pytest.mark.parametrize("num_tokens", some([1, 2, 40, 130], 2))
def test_tokens_of_experts_have_the_updates_of_their_slots(ops: CpuOps, num_tokens: int) -> None:
    """Expert 3 has all tokens, and reads the layer's input itself."""
    torch.manual_seed(num_tokens)
    experts, slots = Experts(ops), mixed_slots(num_tokens, num_tokens)
    x, scores = torch.randn(num_tokens, 96).to(ops.dtype), torch.randn(num_tokens, 5)
    scores[:, 3] = 9
    base, answer = experts.run(x, scores, None), experts.run(x, scores, slots)
    error = answer - experts.reference.fused_moe(x.float(), scores, experts.reference_packed, Routing(2))
    assert error.abs().max() < (0.1 if ops.dtype == torch.bfloat16 else 1e-4)
    for token, slot in enumerate(slots):
        assert torch.equal(answer[token], base[token]) == (slot in (0, NUM_SLOTS))
        if token % 7 == 0:
            one = slice(token, token + 1)
            assert torch.equal(experts.run(x[one], scores[one], [slot])[0], answer[token])


def test_a_space_of_the_kernels_is_theirs(ops: CpuOps) -> None:
    assert isinstance(ops.adapter_space(3, 8), CpuAdapterSpace) and ops.adapter_space(3, 8).num_slots == 3
