"""Steps of the fused decoder with rows of several adapters equal the reference with merged weights, its own layers, and
steps of each row alone, at every instruction level."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    NO_ACTIVATION,
    Activation,
    CacheGroup,
    DecoderWeights,
    ExpertsWeights,
    LowRankPart,
    LowRankUpdate,
    PackedLinear,
)
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.reference import PlainLinear, ReferenceOps
from tokenloom.tests.support.random_decoders import NUM_IDS, Builder, ExpertFields, Fields, draw, run_layers
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import make_metadata

BLOCK_SIZE = 16
RANKS = (3, 16, 40)  # of slots 1, 2, 3; slot 4 has an empty adapter
ROWS = [
    (30, 1, [1, 2]),
    (3, 1, [3]),
    (7, 1, [4]),
    (0, 1, [5]),
    (20, 1, [6, 7]),
    (16, 41, [8, 9, 10, 11]),
    (0, 30, [12, 13]),
]
SLOTS = [1, 0, 2, 1, 4, 3, 2]  # of the rows
DECODERS = {
    "dense": Fields(),
    "odd": Fields(hidden_size=72, inner_sizes=(100, 60), head_dim=8, rotated=(8, 8), has_bias=True, qkv_clip=2.0),
    "tied": Fields(is_tied=True, has_positions=True, embedding_scale=2.0, logit_scale=0.5, logit_softcap=2.0),
    "sandwich": Fields(order="sandwich", activation=Activation("gelu_tanh"), residual_scale=0.5),
    "parallel": Fields(order="parallel", norm="layer", head_norms="per head"),
    "experts": Fields(experts=ExpertFields(num_experts=4, top_k=2, shared="gated", is_normalized=True)),
    "experts without gates": Fields(experts=ExpertFields(top_k=1, shared="plain"), activation=Activation("relu2")),
}


def update_of(name: str, slot: int, inputs: int, outputs: int) -> LowRankUpdate | None:
    """Draw an adapter's update of a layer: of two or three parts for some layers, for others only of the last."""
    if not 1 <= slot <= len(RANKS) or (slot == 2 and name.startswith("output")):
        return None
    rank, num_parts = RANKS[slot - 1], {"qkv": 3, "up ": 2, "gat": 2}.get(name[:3], 1)
    cuts = [outputs * part // num_parts for part in range(num_parts + 1)]
    parts = [
        LowRankPart(
            start,
            draw(f"{name} a {slot} {start}", rank, inputs, deviation=inputs**-0.5),
            draw(f"{name} b {slot} {start}", stop - start, rank, deviation=0.5 * rank**-0.5),
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    has_scale = zlib.crc32(f"{name} {slot}".encode()) % 2 and name not in ("table",)
    scale = 1 + 0.3 * draw(f"{name} scale {slot}", outputs) if has_scale else None
    return LowRankUpdate(parts[slot == 1 :] if num_parts > 1 else parts, scale)


def merge(weight: Tensor, update: LowRankUpdate | None) -> Tensor:
    merged = weight.clone()
    for part in () if update is None else update.parts:
        merged[part.first_output : part.first_output + len(part.b)] += part.b @ part.a
    return merged if update is None or update.scale is None else merged * update.scale[:, None]


class AdaptedBuilder(Builder):
    """Makes a decoder whose layers have slots, filled with the adapters of `update_of`."""

    def __init__(self, fields: Fields, ops: CpuOps) -> None:
        super().__init__(fields, ops, ops.dtype)
        self.space = ops.adapter_space(4, max(RANKS))

    def decoder(self) -> DecoderWeights:
        weights = super().decoder()
        slots = self.space.attach_embedding(weights.table, 0)
        for slot in range(1, 5):
            slots.fill(slot, update_of("table", slot, NUM_IDS, self.fields.hidden_size))
        if self.fields.is_tied:
            self._attach("head", weights.head)
        return weights

    def linear(self, name: str, inputs: int, outputs: int, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        packed = super().linear(name, inputs, outputs, activation)
        self._attach(name, packed)
        return packed

    def experts(self) -> ExpertsWeights:
        weights, e = super().experts(), self.fields.experts
        assert e is not None
        inner, hidden, numbers = self.fields.inner_sizes[1], self.fields.hidden_size, range(e.num_experts)
        num_ups, slots = inner * (1 + self.fields.activation.is_gated), self.space.attach_experts(weights.experts, 2)
        for slot in range(1, 5):
            ups = [update_of(f"gate_up {number}", slot, hidden, num_ups) for number in numbers]
            slots.fill(slot, ups, [update_of(f"down of {number}", slot, inner, hidden) for number in numbers])
        return weights

    def _attach(self, name: str, packed: PackedLinear) -> None:
        slots = self.space.attach(packed, 3)
        is_gated = name.startswith("up ") and self.fields.activation.is_gated
        for slot in range(1, 5):
            slots.fill(slot, update_of(name, slot, packed.in_features, packed.out_features * (1 + is_gated)))


class MergedBuilder(Builder):
    """Makes the float32 decoder of one slot, for the reference."""

    def __init__(self, fields: Fields, slot: int) -> None:
        super().__init__(fields, ReferenceOps(), torch.float32)
        self.slot = slot

    def decoder(self) -> DecoderWeights:
        weights = super().decoder()
        table = draw("table", NUM_IDS, self.fields.hidden_size)
        head = weights.head
        if self.fields.is_tied:
            head = PlainLinear(merge(table, update_of("head", self.slot, self.fields.hidden_size, NUM_IDS)), None)
        looked_up = update_of("table", self.slot, NUM_IDS, self.fields.hidden_size)
        return replace(weights, table=merge(table.T, looked_up).T, head=head)

    def matrix(self, name: str, inputs: int, outputs: int) -> Tensor:
        return merge(super().matrix(name, inputs, outputs), update_of(name, self.slot, inputs, outputs))


def fill_cache(fields: Fields, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(14, 2, 2, fields.num_kv_heads, BLOCK_SIZE, fields.head_dim).bfloat16().to(dtype)


def token_slots(rows: list[int]) -> Tensor:
    return torch.tensor([SLOTS[row] for row in rows for _ in range(ROWS[row][1])], dtype=torch.int32)


def token_ids(rows: list[int]) -> Tensor:
    return torch.tensor([(11 * row + 7 * token) % NUM_IDS for row in rows for token in range(ROWS[row][1])])


class Run:
    """A fused decoder with adapters, and steps of some rows."""

    def __init__(self, fields: Fields, ops: CpuOps) -> None:
        self.fields, self.ops = fields, ops
        builder = AdaptedBuilder(fields, ops)
        self.space, self.weights = builder.space, builder.decoder()
        decoder = ops.fuse_decoder(self.weights)
        assert decoder is not None
        self.decoder = decoder

    def step(self, rows: list[int], has_slots: bool = True) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits of all tokens of the rows."""
        metadata, cache = (
            make_metadata([ROWS[row] for row in rows], BLOCK_SIZE),
            fill_cache(self.fields, self.ops.dtype),
        )
        self.space.begin_step(token_slots(rows) if has_slots else None)
        ids = token_ids(rows)
        hidden, logits = self.decoder(ids, torch.arange(len(ids)), [CacheGroup(cache, metadata)])
        return hidden.clone(), logits.clone()


EVERY = list(range(len(ROWS)))


@pytest.fixture
def run(request: pytest.FixtureRequest, library: KernelLibrary, kind: tuple[torch.dtype, str]) -> Run:
    return Run(DECODERS[request.param], CpuOps(library, kind[0]))


def each_decoder(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", some(names or list(DECODERS), 2), indirect=True)


@each_decoder()
def test_each_row_equals_the_reference_with_merged_weights(run: Run) -> None:
    """In bf16 the roundings of two layers are allowed for; they change the choice of experts for a few tokens."""
    hidden, logits = run.step(EVERY)
    slots, metadata = token_slots(EVERY), make_metadata(ROWS, BLOCK_SIZE)
    bases = None
    for slot in range(5):
        weights, cache = MergedBuilder(run.fields, slot).decoder(), fill_cache(run.fields, torch.float32)
        every = torch.arange(len(slots))
        exact = run_layers(ReferenceOps(), weights, token_ids(EVERY), every, metadata, cache)
        bases = bases or exact
        of_slot = slots == slot
        for answer, expected, base in zip((hidden, logits), exact, bases, strict=True):
            answer, deviation = answer[of_slot], float(expected.std())
            if 1 <= slot <= len(RANKS):
                assert (expected - base)[of_slot].abs().mean() > 0.2 * deviation, "the adapter would not be missed"
            if answer.dtype == torch.float32 and run.ops.dtype == torch.float32:
                torch.testing.assert_close(answer, expected[of_slot], rtol=1e-4, atol=1e-4 * deviation)
            else:
                error = (answer.float() - expected[of_slot]).square().mean(dim=-1).sqrt() / deviation
                assert error.median() < 0.05


@each_decoder()
def test_a_row_has_the_same_bits_alone_and_among_rows_of_other_adapters(run: Run) -> None:
    """Prompts are rows of their own length; only prompts of the whole step are attended to in the same blocks."""
    together, starts = run.step(EVERY), make_metadata(ROWS, BLOCK_SIZE).query_starts_host
    bases = run.step(EVERY, has_slots=False)
    for row in EVERY:
        alone, tokens = run.step([row]), slice(starts[row], starts[row + 1])
        for answer, expected, base in zip(alone, together, bases, strict=True):
            assert torch.equal(answer, expected[tokens])
            assert torch.equal(answer, base[tokens]) == (SLOTS[row] in (0, 4))


@each_decoder("dense", "odd", "experts")
def test_threads_do_not_change_a_bit(run: Run, num_threads: Callable[[int], None]) -> None:
    answers = []
    for count in (1, 2, 3):
        num_threads(count)
        answers += [run.step(EVERY), run.step([0])]
    for number, answer in enumerate(answers):
        assert all(map(torch.equal, answer, answers[number % 2]))


@each_decoder("dense", "odd", "tied", "experts")
def test_the_fused_decoder_equals_its_operations(run: Run) -> None:
    """In float32 within rounding. The operations round more often in bf16."""
    hidden, logits = run.step(EVERY)
    metadata, cache = make_metadata(ROWS, BLOCK_SIZE), fill_cache(run.fields, run.ops.dtype)
    run.space.begin_step(token_slots(EVERY))
    every = torch.arange(len(hidden))
    answers = run_layers(run.ops, run.weights, token_ids(EVERY), every, metadata, cache)
    for answer, expected in zip((hidden, logits), answers, strict=True):
        if run.ops.dtype == torch.float32:
            torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)
        else:
            error = (answer.float() - expected.float()).square().mean(dim=-1).sqrt() / expected.float().std()
            assert error.median() < 0.05


@each_decoder("dense", "experts")
def test_logits_of_some_tokens_have_the_slots_of_those_tokens(run: Run) -> None:
    """The indices are partial, unordered and repeated, or more than the tokens."""
    logits, metadata = run.step(EVERY)[1], make_metadata(ROWS, BLOCK_SIZE)
    ids = token_ids(EVERY)
    for chosen in ([2], [60, 3, 60, 0], [1, 4], [], [*range(76), *range(76)]):
        run.space.begin_step(token_slots(EVERY))
        indices, cache = torch.tensor(chosen, dtype=torch.int64), fill_cache(run.fields, run.ops.dtype)
        assert torch.equal(run.decoder(ids, indices, [CacheGroup(cache, metadata)])[1], logits[indices])


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_prompt_in_chunks_has_the_bits_of_one_in_a_single_step(
    name: str, library: KernelLibrary, kind: tuple[torch.dtype, str]
) -> None:
    """With batch-invariant attention; another adapter's prompt stands beside the second chunk."""
    run = Run(DECODERS[name], CpuOps(library, kind[0], is_batch_invariant=True))
    ids, blocks = torch.arange(40) % NUM_IDS, [1, 2, 3]

    def step(rows: list[tuple[int, int, list[int]]], slots: list[int], ids: Tensor, cache: Tensor) -> Tensor:
        run.space.begin_step(torch.tensor(slots, dtype=torch.int32))
        group = CacheGroup(cache, make_metadata(rows, BLOCK_SIZE))
        return run.decoder(ids, torch.arange(len(ids)), [group])[1].clone()

    whole = step([(0, 40, blocks)], [3] * 40, ids, fill_cache(run.fields, kind[0]))
    cache = fill_cache(run.fields, kind[0])
    parts = [step([(0, 7, blocks)], [3] * 7, ids[:7], cache)]
    rows = [(7, 20, blocks), (0, 9, [4])]
    parts += [step(rows, [3] * 20 + [1] * 9, torch.cat((ids[7:27], ids[:9])), cache)[:20]]
    parts += [step([(27, 13, blocks)], [3] * 13, ids[27:], cache)]
    assert torch.equal(torch.cat(parts), whole)
