"""Time steps of rows with adapters and without.

    python -m tokenloom.scripts.checkpoints.compare_adapters [SHAPE ...]

A decoder of some layers of the shape, with random weights, computes decode rows at the first position, so that its
time is that of the linear layers; embedding and head are small. Adapters have one rank on all linears, and rows take
them by turns. Each round times a step without adapters, then one of each case, by the CPU time of one thread. `share`
is the least time without adapters by the least time with them; `idle` is the same for a decoder without any slots by
one with slots that no row uses. `bytes` is the least share if a step were bound by reading weights alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    AdapterSpace,
    AttentionSpec,
    AttentionWeights,
    CacheGroup,
    DecoderWeights,
    LayerWeights,
    LowRankPart,
    LowRankUpdate,
    MLPWeights,
    Norm,
    PackedLinear,
    Rotary,
)
from tokenloom.kernels.cpu.cpu_ops import CpuOps, load_cpu_ops
from tokenloom.kernels.cpu.loader import load_kernels
from tokenloom.scripts.bench.runner import Case, Setup, run_case
from tokenloom.scripts.checkpoints.compare_families import in_turn
from tokenloom.tests.workers.paged_run import make_metadata

VOCAB, BLOCK_SIZE = 32, 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder, and the layers to time: more than the caches hold."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def qkv(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def adapter_share(self, rank: int) -> float:
        """Return the elements of an adapter by those of the weights."""
        outputs, attended = sum(self.qkv), self.qkv[0]
        weights = self.hidden * (outputs + attended + 3 * self.inner)
        inputs = 3 * self.hidden + attended + 2 * self.hidden + self.inner
        return rank * (inputs + outputs + 2 * self.hidden + 2 * self.inner) / weights


SHAPES = {
    "135M": Shape(576, 1536, 9, 3, 64, 30, torch.float32),
    "0.6B": Shape(1024, 3072, 16, 8, 128, 8),
    "8B": Shape(4096, 14336, 32, 8, 128, 2),
}


class Decoder:
    """A decoder whose layers have slots, if there are any, all with adapters of the same numbers."""

    def __init__(self, shape: Shape, isa: str, num_slots: int, rank: int) -> None:
        self._shape, self._rank = shape, rank
        self._ops: CpuOps = load_cpu_ops(shape.dtype, isa=isa)
        self._space: AdapterSpace | None = self._ops.adapter_space(num_slots, rank) if num_slots else None
        s, norm = shape, Norm("rms", torch.ones(shape.hidden), None, 1e-5)
        cos_sin = torch.ones(BLOCK_SIZE, s.head_dim)
        layers = [
            LayerWeights(
                input_norm=norm,
                attention=AttentionWeights(
                    qkv=self._linear(s.hidden, s.qkv),
                    head_norms=None,
                    rotary=Rotary(cos_sin),
                    spec=AttentionSpec(s.head_dim**-0.5),
                    output=self._linear(s.qkv[0], (s.hidden,)),
                    cache_layer=layer,
                ),
                mixer_output_norm=None,
                mlp_norm=norm,
                mlp=MLPWeights(
                    self._linear(s.hidden, (s.inner, s.inner), GATED_SILU), self._linear(s.inner, (s.hidden,))
                ),
                mlp_output_norm=None,
                is_parallel=False,
            )
            for layer in range(shape.layers)
        ]
        table = self._ops.pack_linear(torch.randn(VOCAB, s.hidden).to(s.dtype), None)
        sizes = (s.heads, s.kv_heads, s.head_dim)
        weights = DecoderWeights(table, None, 1.0, layers, 1.0, norm, table, 1.0, 0.0, *sizes)
        fused = self._ops.fuse_decoder(weights)
        assert fused is not None
        self._fused = fused

    def _linear(self, inputs: int, outputs: tuple[int, ...], activation: Activation = NO_ACTIVATION) -> PackedLinear:
        weight = (torch.randn(sum(outputs), inputs) / inputs**0.5).to(self._shape.dtype)
        packed = self._ops.pack_linear(weight, None, activation)
        if self._space is None:
            return packed
        slots, rank = self._space.attach(packed, len(outputs)), self._rank
        firsts = [sum(outputs[:part]) for part in range(len(outputs))]
        update = LowRankUpdate(
            [
                LowRankPart(first, torch.randn(rank, inputs) / inputs**0.5, torch.randn(count, rank) / rank**0.5)
                for first, count in zip(firsts, outputs, strict=True)
            ]
        )
        for slot in range(1, self._space.num_slots + 1):
            slots.fill(slot, update)
        return packed

    def step(self, num_rows: int, num_adapters: int) -> Callable[[], object]:
        """Return a step of rows that take this many adapters by turns."""
        metadata = make_metadata([(0, 1, [row + 1]) for row in range(num_rows)], BLOCK_SIZE)
        s = self._shape
        cache = torch.zeros(num_rows + 1, s.layers, 2, s.kv_heads, BLOCK_SIZE, s.head_dim, dtype=s.dtype)
        ids, indices = torch.arange(num_rows, dtype=torch.int32) % VOCAB, torch.arange(num_rows)
        slots: Tensor | None = torch.arange(num_rows, dtype=torch.int32) % num_adapters + 1 if num_adapters else None

        def run() -> None:
            if self._space is not None:
                self._space.begin_step(slots)
            self._fused(ids, indices, [CacheGroup(cache, metadata)])

        return run


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(options.threads)
    report.note("kernels", str(load_kernels(True, isa=options.cpu_isa)))
    with torch.inference_mode():
        for name in options.shapes or SHAPES:
            shape = SHAPES[name]
            plain, decoder = (
                Decoder(shape, options.cpu_isa, slots, options.rank) for slots in (0, max(options.adapters))
            )
            for num_rows in options.rows:
                counts = [count for count in options.adapters if count <= num_rows]
                steps = [plain.step(num_rows, 0), *(decoder.step(num_rows, count) for count in (0, *counts))]
                took = in_turn(steps, setup)
                without, base, *others = (min(times) for times in zip(*took, strict=True))
                for count, least in zip(counts, others, strict=True):
                    report.add(
                        shape=name,
                        rows=num_rows,
                        adapters=count,
                        base_ms=base * 1e3,
                        share=base / least,
                        idle=without / base,
                        bytes=1 / (1 + count * shape.adapter_share(options.rank)),
                    )


OPTIONS = {
    "shapes": ([], f"of {', '.join(SHAPES)}; default: all"),
    "--rows": ([1, 8, 32, 128],),
    "--adapters": ([1, 8, 32, 128],),
    "--rank": (16,),
    "--threads": (1,),
    "--cpu-isa": ("auto",),
}
CASE = Case("adapters", measure, OPTIONS, model="", rounds=20)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
