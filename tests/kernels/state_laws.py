"""Laws of the operations on states, for the tests of every implementation: random rows with their states in a pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.kernels.contract import ConvActivation, GateOrder, Norm, Rates, StateMetadata
from tokenloom.kernels.reference import ReferenceOps

NUM_BLOCKS = 16


@dataclass(frozen=True)
class StateForm:
    """Shapes and options of a layer with a state."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    num_taps: int = 4
    num_channels: int = 80
    dtype: torch.dtype = torch.float32
    has_beta: bool = True
    has_bias: bool = False
    activation: ConvActivation = "silu"
    order: GateOrder = "norm_then_silu"
    shares_norm: bool = True  # by all groups
    has_floats: bool = False  # q, k and v are float32 whatever the dtype


FORMS = [
    StateForm(),
    StateForm(4, 4, 16, 48, dtype=torch.bfloat16, has_bias=True, shares_norm=False),
    StateForm(1, 6, 20, 16, num_taps=3, num_channels=33, has_beta=False, order="silu_then_norm"),
    StateForm(2, 2, 128, 32, num_taps=2, dtype=torch.bfloat16, activation="none", has_floats=True),
    StateForm(1, 2, 7, 64, has_beta=False, dtype=torch.bfloat16, order="silu_then_norm", has_floats=True),
]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Inputs of the operations for n tokens of one or more rows."""

    x: Tensor  # [n, C]
    q: Tensor  # [n, Hk, Dk]
    k: Tensor  # [n, Hk, Dk]
    v: Tensor  # [n, Hv, Dv]
    decay: Tensor  # [n, Hv]
    beta: Tensor  # [n, Hv]
    gate: Tensor  # [n, Hv * Dv]

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(getattr(self, field.name)[start:stop] for field in fields(self)))

    @staticmethod
    def joined(parts: list[Tokens]) -> Tokens:
        return Tokens(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Tokens)))


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of the operations."""

    conv: Tensor
    bias: Tensor | None
    norm: Norm


def draw_tokens(form: StateForm, num_tokens: int) -> Tokens:
    """Draw inputs like those of a model: unit keys, and a decay and a beta below 1. Heads are views of wider rows."""
    dtype = torch.float32 if form.has_floats else form.dtype
    num_keys, num_values = form.key_heads * form.key_dim, form.value_heads * form.value_dim
    mixed = torch.randn(num_tokens, 2 * num_keys + num_values)
    q, k, v = torch.split(mixed, [num_keys, num_keys, num_values], dim=1)
    q, k = (torch.unflatten(each, 1, (form.key_heads, form.key_dim)) for each in (q, k))
    k /= k.norm(dim=-1, keepdim=True)
    mixed = mixed.to(dtype)
    q, k, v = torch.split(mixed, [num_keys, num_keys, num_values], dim=1)
    return Tokens(
        torch.randn(num_tokens, form.num_channels + 7).to(form.dtype)[:, : form.num_channels],
        torch.unflatten(q, 1, (form.key_heads, form.key_dim)),
        torch.unflatten(k, 1, (form.key_heads, form.key_dim)),
        torch.unflatten(v, 1, (form.value_heads, form.value_dim)),
        torch.rand(num_tokens, form.value_heads) ** 0.2,
        torch.rand(num_tokens, form.value_heads),
        torch.randn(num_tokens, num_values).to(form.dtype),
    )


def draw_weights(form: StateForm) -> Weights:
    num_weights = form.value_dim * (1 if form.shares_norm else form.value_heads)
    return Weights(
        torch.randn(form.num_channels, form.num_taps).to(form.dtype),
        torch.randn(form.num_channels).to(form.dtype) if form.has_bias else None,
        Norm("rms", torch.randn(num_weights), None, 1e-6),
    )


class Pool:
    """Blocks of states: strided views of one buffer, as a worker has them. NaN where no state was written."""

    def __init__(self, form: StateForm, num_blocks: int) -> None:
        num_scan = form.value_heads * form.key_dim * form.value_dim
        self.memory = torch.full((num_blocks + 1, 16 + num_scan + form.num_taps * form.num_channels), torch.nan)
        self.buffer = self.memory[1:]  # before it lies block -1, which nothing may write
        elements = self.buffer.view(form.dtype)
        start = (16 + num_scan) * 4 // form.dtype.itemsize
        num_conv = (form.num_taps - 1) * form.num_channels
        self.scan = torch.unflatten(
            self.buffer[:, 16 : 16 + num_scan], 1, (form.value_heads, form.key_dim, form.value_dim)
        )
        self.conv = torch.unflatten(elements[:, start : start + num_conv], 1, (form.num_taps - 1, form.num_channels))

    def bits(self) -> Tensor:
        """The bits of each block, block -1 last: [blocks + 1, words]."""
        return self.memory.view(torch.int32).roll(-1, dims=0)


def metadata_of(lengths: list[int], reads: list[int], writes: list[int]) -> StateMetadata:
    starts = [0, *accumulate(lengths)]
    return StateMetadata(*(torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, reads, writes)))


def compute(
    ops: ReferenceOps, form: StateForm, weights: Weights, tokens: Tokens, pool: Pool, metadata: StateMetadata
) -> Tensor:
    """Run the operations on a step; return the outputs of all, side by side: [T, …] float32."""
    convolved = ops.causal_conv(tokens.x, weights.conv, weights.bias, form.activation, pool.conv, metadata)
    beta = tokens.beta if form.has_beta else None
    scanned = ops.state_scan(tokens.q, tokens.k, tokens.v, tokens.decay, beta, pool.scan, metadata)
    normed = ops.gated_norm(scanned.flatten(1), tokens.gate, weights.norm, form.value_heads, form.order)
    assert convolved.dtype == normed.dtype == form.dtype and scanned.dtype == tokens.v.dtype
    return torch.cat((convolved.float(), scanned.flatten(1).float(), normed.float()), dim=1)


def compute_whole(ops: ReferenceOps, form: StateForm, weights: Weights, tokens: Tokens) -> Tensor:
    """Run the operations on a row alone, from its first to its last token at once."""
    metadata = metadata_of([len(tokens.x)], [-1], [-1])
    return compute(ops, form, weights, tokens, Pool(form, 1), metadata)


def exact(form: StateForm, weights: Weights, tokens: Tokens, read: Tensor) -> list[Tensor]:
    """Compute the operations on a row in float64, from the formulas. read: the outputs of a scan, which are normalized:
    the norm of a head that is almost zero would enlarge their errors."""
    padded = torch.cat((torch.zeros(form.num_taps - 1, form.num_channels), tokens.x)).double()
    windows = padded.unfold(0, form.num_taps, 1)  # [n, C, K]
    convolved = (windows * weights.conv.double()).sum(-1)
    if weights.bias is not None:
        convolved += weights.bias.double()
    if form.activation == "silu":
        convolved = F.silu(convolved)
    group = form.value_heads // form.key_heads
    state = torch.zeros(form.value_heads, form.key_dim, form.value_dim, dtype=torch.float64)
    scanned = []
    for q, k, v, decay, beta in zip(tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta, strict=True):
        for head in range(form.value_heads):
            key = k[head // group].double()
            matrix = decay[head].double() * state[head]
            change = v[head].double()
            if form.has_beta:
                change = beta[head].double() * (change - key @ matrix)
            state[head] = matrix + torch.outer(key, change)
        scanned.append(torch.stack([q[head // group].double() @ state[head] for head in range(form.value_heads)]))
    assert weights.norm.weight is not None
    weight = weights.norm.weight.double().view(-1, form.value_dim)
    factor = F.silu(tokens.gate.double()).view(-1, form.value_heads, form.value_dim)
    heads = read.double().view(factor.shape)
    if form.order == "silu_then_norm":
        heads = heads * factor
    normed = heads / (heads.square().mean(-1, keepdim=True) + weights.norm.eps).sqrt() * weight
    if form.order == "norm_then_silu":
        normed = normed * factor
    return [convolved, torch.stack(scanned).flatten(1), normed.flatten(1)]


def assert_outputs_are_exact(ops: ReferenceOps, form: StateForm, seed: int, bf16_error: float = 2.0**-8) -> None:
    """Compare the operations with their formulas in float64."""
    torch.manual_seed(seed)
    weights, tokens = draw_weights(form), draw_tokens(form, 50)
    parts = [form.num_channels, form.value_heads * form.value_dim, form.value_heads * form.value_dim]
    found = torch.split(compute_whole(ops, form, weights, tokens).double(), parts, dim=1)
    for answer, wanted in zip(found, exact(form, weights, tokens, found[1]), strict=True):
        eps = 1e-6 if form.dtype == torch.float32 else bf16_error
        assert (answer - wanted).abs().max() < eps * wanted.abs().max().clamp(min=1)


def assert_rows_are_alone(ops: ReferenceOps, form: StateForm) -> None:
    """Let three rows go on from one snapshot, beside a row with a state of NaN, an empty segment and padding."""
    torch.manual_seed(1)
    weights, pool, tokens = draw_weights(form), Pool(form, 8), draw_tokens(form, 9)
    compute(ops, form, weights, tokens, pool, metadata_of([9], [-1], [3]))
    others = [0, 1, 3, 7, 8]  # that the step does not write; the last is block -1
    before = pool.bits()[others]
    fresh = draw_tokens(form, 20)  # 5 tokens of each of three rows, 3 of the row with NaN, 2 of padding
    metadata = metadata_of([5, 0, 3, 5, 5], [3, 3, 2, 3, 3], [4, 6, 2, -1, 5])
    outputs = compute(ops, form, weights, fresh, pool, metadata)
    assert torch.equal(pool.bits()[others], before)
    assert torch.equal(pool.scan[6], pool.scan[3]) and torch.equal(pool.conv[6], pool.conv[3])
    num_scan = form.num_channels + form.value_heads * form.value_dim
    assert outputs[5:8, form.num_channels : num_scan].isnan().all()
    assert not outputs[18:, :num_scan].any()
    assert pool.scan[2].isnan().all() and pool.scan[4:6].isfinite().all()
    for start in (0, 8, 13):
        alone = Pool(form, 2)
        alone.buffer[1] = pool.buffer[3]
        row = compute(ops, form, weights, fresh.part(start, start + 5), alone, metadata_of([5], [1], [0]))
        assert torch.equal(row, outputs[start : start + 5])


class CutRow:
    """A row that is computed in chunks, and the outputs that its tokens had when they were computed at once."""

    def __init__(self, tokens: Tokens, whole: Tensor) -> None:
        self.tokens = tokens
        self.whole = whole
        self.block = -1  # that holds its state
        self.num_computed = 0

    @property
    def is_done(self) -> bool:
        return self.num_computed == len(self.whole)


class Chunk:
    """Tokens of one row in one step: segments; after each the state stays in its block or is in a free one."""

    def __init__(self, draw: random.Random, row: CutRow, free: list[int]) -> None:
        self.row = row
        self.start = row.num_computed
        count = min(draw.choice([1, 1, 2, 3, 16, 40]), len(row.whole) - self.start)
        cuts = sorted(draw.sample(range(1, count), draw.randint(0, min(2, count - 1))))
        self.stop = self.start + count
        self.lengths = [stop - start for start, stop in pairwise([0, *cuts, count])]
        self.writes = [free.pop() if row.block < 0 or draw.random() < 0.5 else row.block for _ in self.lengths]
        self.reads = [row.block, *self.writes[:-1]]
        if draw.random() < 0.2 and not cuts:  # drafts, none of which is accepted
            self.writes[-1] = -1

    def finish(self) -> None:
        if self.writes[-1] >= 0:
            self.row.block = self.writes[-1]
            self.row.num_computed = self.stop


def assert_cutting_changes_no_bit(
    ops: ReferenceOps, form: StateForm, seed: int, set_threads: Callable[[int], None] = lambda number: None
) -> None:
    """Compute rows in steps of random chunks, beside each other, and compare each token with that of its row at once.

    NaN is in every block that a step does not read, and blocks that it does not write keep their bits.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weights = draw_weights(form)
    drawn = [draw_tokens(form, draw.randint(1, 40)) for _ in range(draw.randint(1, 4))]
    rows = [CutRow(tokens, compute_whole(ops, form, weights, tokens)) for tokens in drawn]
    pool = Pool(form, NUM_BLOCKS)
    while not all(row.is_done for row in rows):
        set_threads(draw.choice([1, 2, 3]))
        free = [block for block in range(NUM_BLOCKS) if block not in [row.block for row in rows]]
        draw.shuffle(free)
        pool.buffer[free] = torch.nan
        chunks = [Chunk(draw, row, free) for row in rows if not row.is_done and draw.random() < 0.8]
        if chunks:
            compute_chunks(ops, form, weights, chunks, pool)


def compute_chunks(ops: ReferenceOps, form: StateForm, weights: Weights, chunks: list[Chunk], pool: Pool) -> None:
    """Compute one step and check it."""
    lengths, reads, writes = (
        [number for chunk in chunks for number in numbers(chunk)]
        for numbers in (attrgetter("lengths"), attrgetter("reads"), attrgetter("writes"))
    )
    tokens = Tokens.joined([chunk.row.tokens.part(chunk.start, chunk.stop) for chunk in chunks])
    untouched = [block for block in range(NUM_BLOCKS + 1) if block not in writes]
    before = pool.bits()[untouched]
    outputs = compute(ops, form, weights, tokens, pool, metadata_of(lengths, reads, writes))
    assert torch.equal(pool.bits()[untouched], before)
    for chunk, found in zip(chunks, torch.split(outputs, [chunk.stop - chunk.start for chunk in chunks]), strict=True):
        assert torch.equal(found, chunk.row.whole[chunk.start : chunk.stop])
        chunk.finish()


def assert_numbers_of_heads_are_exact(ops: ReferenceOps, dtype: torch.dtype, seed: int) -> None:
    """Decays and sigmoids are those of the formulas in float64, and a token's bits do not depend on the others."""
    torch.manual_seed(seed)
    rates = Rates(-4 * torch.rand(7), torch.randn(7), 0.1, 20.0)
    a = (10 * torch.randn(5, 12)).to(dtype)[:, 3:10]
    dt, decay = ops.state_decay(a, rates)
    exact = F.softplus(a.double() + rates.dt_bias).clamp(rates.min_dt, rates.max_dt)
    torch.testing.assert_close(dt, exact.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(decay, (rates.rate * exact).exp().float(), rtol=1e-4, atol=1e-30)
    share = ops.sigmoid(a)
    torch.testing.assert_close(share, a.double().sigmoid().to(dtype))
    for token in range(len(a)):
        alone = a[token : token + 1]
        found = *ops.state_decay(alone, rates), ops.sigmoid(alone)
        assert all(torch.equal(one[0], all_[token]) for one, all_ in zip(found, (dt, decay, share), strict=True))
