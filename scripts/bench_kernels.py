"""Speed of the CPU kernels over whole models: python scripts/bench_kernels.py [MODEL ...] [--rounds 20] [--json FILE]

Random weights of a model's shape (names as in make_checkpoint.py), packed as by a worker; a step is what a worker
computes, embedding to logits, without sampling. Rounds alternate between what the machine allows just now and each
case, and ratios are taken within a round: the speed of a shared machine drifts by a factor of two.

    read rate     one pass over a buffer as large as the weights     limit of a decode step: weight bytes / read rate
    matmul rate   one layer's linears at 1024 rows, by torch         limit of a prefill: flops / matmul rate,
                                                                     flops = linears + causal half of attention
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenloom.kernels.cpu.arena import PackedMemory
from tokenloom.kernels.cpu.compiler import compiled_library, instruction_levels
from tokenloom.kernels.cpu.library import KernelLibrary, load_library
from tokenloom.kernels.ops import AttentionMetadata, DecoderWeights, LayerWeights, Ops, PackedLinear, select_ops
from tokenloom.scripts.bench_matmul import fastest_linear
from tokenloom.scripts.make_checkpoint import CONFIGS

BLOCK_SIZE = 16
CASES = {"decode 1 x 160": [(160, 1)], "decode 32 x 160": [(160, 1)] * 32, "prefill 1024": [(1024, 1024)]}
MATMUL_ROWS = 1024


@dataclass(frozen=True)
class Shape:
    """The numbers of a model, from its config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(cls, name: str) -> Shape:
        return cls(**{field: CONFIGS[name][field] for field in cls.__dataclass_fields__})  # type: ignore[arg-type]

    def linears(self) -> list[tuple[int, int]]:
        """(out, in) of q/k/v, attention's output, gate/up, down."""
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return [
            (query + 2 * key, self.hidden_size),
            (self.hidden_size, query),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    @property
    def layer_weights(self) -> int:
        return self.num_hidden_layers * sum(rows * columns for rows, columns in self.linears())

    def flops(self, num_tokens: int, num_sampled: int) -> int:
        """Of a prompt from its first token on."""
        pairs = num_tokens * (num_tokens + 1) // 2
        attention = 4 * pairs * self.num_attention_heads * self.head_dim * self.num_hidden_layers
        return 2 * num_tokens * self.layer_weights + 2 * num_sampled * self.vocab_size * self.hidden_size + attention


class RandomModel:
    """A decoder with random weights, one operation where the Ops have it."""

    def __init__(self, shape: Shape, ops: Ops, dtype: torch.dtype) -> None:
        self.shape, self._ops, self._dtype = shape, ops, dtype
        self._noise = torch.randn((1 << 22) + 3).to(dtype)
        ones = torch.ones(shape.hidden_size, dtype=dtype)
        norm = torch.ones(shape.head_dim, dtype=dtype)
        layers = []
        for _ in range(shape.num_hidden_layers):
            qkv, output, gate_up, down = (
                ops.pack_linear(self._draw(*size), None, is_gated=number == 2)
                for number, size in enumerate(shape.linears())
            )
            layers.append(LayerWeights(ones, qkv, norm, norm, output, ones, gate_up, down, None))
        self.head: PackedLinear = ops.pack_linear(self._draw(shape.vocab_size, shape.hidden_size), None)
        angles = torch.rand(2048, shape.head_dim // 2)
        weights = DecoderWeights(
            table=self.head,
            layers=layers,
            norm=ones,
            eps=1e-6,
            cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
            scale=shape.head_dim**-0.5,
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
        )
        fused = ops.fuse_decoder(weights)
        assert fused is not None, "these Ops have no fused decoder"
        self.forward = fused

    def _draw(self, num_rows: int, num_columns: int) -> Tensor:
        repeats = -(-num_rows * num_columns // len(self._noise))
        drawn = self._noise.repeat(repeats)[: num_rows * num_columns].view(num_rows, num_columns)
        return drawn.mul_(1 / math.sqrt(num_columns))

    @property
    def weight_bytes(self) -> int:
        """What every step reads."""
        return (self.shape.layer_weights + self.shape.vocab_size * self.shape.hidden_size) * self._dtype.itemsize

    def case(self, rows: list[tuple[int, int]]) -> Callable[[], object]:
        """A step of rows (context, new tokens), as a function."""
        metadata, num_blocks = scattered_rows(rows)
        shape = self.shape
        kv_cache = torch.empty(
            (num_blocks, shape.num_hidden_layers, 2, shape.num_key_value_heads, BLOCK_SIZE, shape.head_dim),
            dtype=self._dtype,
        ).normal_()
        token_ids = torch.randint(0, shape.vocab_size, (metadata.query_starts_host[-1],))
        last = metadata.query_starts[1:].long() - 1
        return lambda: self._ops.logits(self.forward(token_ids, metadata, kv_cache)[last], self.head)


def scattered_rows(rows: list[tuple[int, int]]) -> tuple[AttentionMetadata, int]:
    """Metadata of rows (context, new tokens) whose blocks lie anywhere in the pool, and the size of the pool."""
    counts = [-(-context // BLOCK_SIZE) for context, _ in rows]
    blocks = torch.split(torch.randperm(sum(counts)) + 1, counts)
    tables = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
    positions, slots, starts = [], [], [0]
    for row, (context, num_new) in enumerate(rows):
        tables[row, : counts[row]] = blocks[row]
        new = torch.arange(context - num_new, context)
        positions.append(new)
        slots.append(blocks[row][new // BLOCK_SIZE] * BLOCK_SIZE + new % BLOCK_SIZE)
        starts.append(starts[-1] + num_new)
    lengths = [context for context, _ in rows]
    metadata = AttentionMetadata(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        num_decode_rows=sum(num_new == 1 for _, num_new in rows),
        query_starts_host=starts,
        seq_lens_host=lengths,
        max_seq_len=max(lengths),
    )
    return metadata, sum(counts) + 1


class Limits:
    """What the machine allows just now, for one model."""

    def __init__(self, library: KernelLibrary, shape: Shape, weight_bytes: int, dtype: torch.dtype) -> None:
        self._library = library
        self._num_bytes = weight_bytes // 256 * 256
        self._address, self._owner = PackedMemory().allocate(weight_bytes)  # huge pages, as the weights have them
        ctypes.memset(self._address, 1, weight_bytes)
        self._flops = sum(2 * MATMUL_ROWS * rows * columns for rows, columns in shape.linears())
        cpu = torch.device("cpu")
        self._matmuls = [fastest_linear(size, MATMUL_ROWS, dtype, cpu) for size in shape.linears()]

    def read_rate(self) -> float:
        """Bytes per second."""
        threads = torch.get_num_threads()
        return self._num_bytes / seconds(lambda: self._library.op_read(self._address, self._num_bytes, threads))

    def matmul_rate(self) -> float:
        """Flops per second; the second of two passes."""
        return self._flops / min(seconds(lambda: [matmul() for matmul in self._matmuls]) for _ in range(2))


@dataclass
class Figures:
    """One case of one model, over the rounds."""

    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the limit, within a round

    def line(self, name: str) -> str:
        best, median = 1e3 * min(self.seconds), 1e3 * statistics.median(self.seconds)
        share = 100 * statistics.median(self.shares)
        return f"{name:24} min {best:8.2f} ms  median {median:8.2f} ms  {share:5.0f} % of the limit"


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def measure_model(name: str, ops: Ops, library: KernelLibrary, dtype: torch.dtype, num_rounds: int) -> dict[str, Any]:
    shape = Shape.of(name)
    model = RandomModel(shape, ops, dtype)
    limits = Limits(library, shape, model.weight_bytes, dtype)
    cases = {case: (rows, model.case(rows)) for case, rows in CASES.items()}
    figures = {case: Figures() for case in CASES}
    reads, matmuls = [], []
    for _ in range(num_rounds):
        for case, (rows, step) in cases.items():
            num_tokens = sum(num_new for _, num_new in rows)
            read, matmul = limits.read_rate(), limits.matmul_rate()
            reads.append(read)
            matmuls.append(matmul)
            took = seconds(step)
            flops = shape.flops(num_tokens, 1) if num_tokens > len(rows) else 0
            figures[case].seconds.append(took)
            figures[case].shares.append(max(model.weight_bytes / read, flops / matmul) / took)
    print(f"{name}: {model.weight_bytes / 1e6:.0f} MB of weights, {statistics.median(reads) / 1e9:.1f} GB/s read,")
    print(f"  {statistics.median(matmuls) / 1e12:.2f} TFLOP/s matmul (medians of {len(reads)})")
    for case, figure in figures.items():
        print(f"  {figure.line(case)}", flush=True)
    return {
        "weight_bytes": model.weight_bytes,
        "read_bytes_per_s": statistics.median(reads),
        "matmul_flops_per_s": statistics.median(matmuls),
        "cases": {case: asdict(figure) for case, figure in figures.items()},
    }


def measure_compiler(level: str) -> dict[str, float]:
    """Seconds of a first compilation and of a later load."""
    with tempfile.TemporaryDirectory() as folder:
        first = seconds(lambda: load_library(compiled_library(True, level, Path(folder))))
        later = seconds(lambda: load_library(compiled_library(True, level, Path(folder))))
    print(f"kernels for {level}: compiled in {first:.1f} s, loaded in {1e3 * later:.1f} ms")
    return {"first_s": first, "later_s": later}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["135m", "0.6b"], metavar="MODEL", help=", ".join(CONFIGS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="none: torch's default")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    levels = instruction_levels()
    if not levels:
        print("the processor has no AVX2: there are no kernels to measure")
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"level": levels[0], "threads": torch.get_num_threads()}
    result["compiler"] = measure_compiler(levels[0])
    with torch.inference_mode():
        dtype = torch.bfloat16
        library, ops = load_library(compiled_library(True, levels[0])), select_ops(torch.device("cpu"), dtype)
        result["models"] = {name: measure_model(name, ops, library, dtype, options.rounds) for name in options.models}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
