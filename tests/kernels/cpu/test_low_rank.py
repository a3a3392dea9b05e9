"""Updates of layers by the C kernels against the reference, and the filling of slots, at every instruction level.

Other layers, and a row beside others, are tested by whole steps in test_low_rank_decoder.py.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    LowRankPart,
    LowRankUpdate,
)
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import BF16_EPS
from tokenloom.tests.support.today import some_pairs

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
    """A random layer with slots, by the C kernels and by the reference in float32."""

    def __init__(
        self, ops: CpuOps, num_inputs: int, outputs: tuple[int, ...], activation: Activation, bias: bool, scale: bool
    ) -> None:
        self.ops, self.reference = ops, ReferenceOps()
        weight = (torch.randn(sum(outputs), num_inputs) / num_inputs**0.5).to(ops.dtype)
        drawn = torch.randn(sum(outputs)).to(ops.dtype) if bias else None
        self.packed = ops.pack_linear(weight, drawn, activation)
        wide = None if drawn is None else drawn.float()
        self.reference_packed = self.reference.pack_linear(weight.float(), wide, activation)
        self.spaces = [each.adapter_space(NUM_SLOTS, max(RANKS)) for each in (ops, self.reference)]
        self.slots = self.spaces[0].attach(self.packed, len(outputs))
        self.reference_slots = self.spaces[1].attach(self.reference_packed, len(outputs))
        for slot, rank in enumerate(RANKS, start=1):
            self.fill(slot, draw_update(rank, num_inputs, outputs, scale))

    def fill(self, slot: int, update: LowRankUpdate) -> None:
        """Fill a slot of both, the reference's with matrices that are rounded as those of a model of this type."""
        self.slots.fill(slot, update)
        dtype = self.ops.dtype
        parts = [replace(part, a=part.a.to(dtype).float(), b=part.b.to(dtype).float()) for part in update.parts]
        self.reference_slots.fill(slot, LowRankUpdate(parts, update.scale))

    def begin_step(self, token_slots: list[int] | None) -> None:
        for space in self.spaces:
            space.begin_step(None if token_slots is None else torch.tensor(token_slots, dtype=torch.int32))

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


def test_a_slot_is_filled_again_between_steps(ops: CpuOps) -> None:
    """With another rank, with other outputs, with none, and with a larger rank than any before."""
    num_inputs, outputs, *_ = LAYERS[0]
    layer = Layer(ops, *LAYERS[0])
    x, slots = torch.randn(9, num_inputs).to(ops.dtype), [2, 0, 2, 1, 2, 3, 2, 5, 2]
    before = layer.run(x, slots)
    for rank in (3, 40, 16, 200):
        layer.fill(2, replace(draw_update(rank, num_inputs, outputs), scale=torch.rand(200) + 0.5))
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


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
