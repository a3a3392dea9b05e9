"""Compile the Triton kernels ahead of time, for any architecture and without a GPU.

    python -m tokenloom.scripts.gpu.compile_kernels [--architectures 80 90]

calls the operations with the shapes of common models on tensors without memory, and compiles each launch instead of
running it, by Triton's own path and so as a device would run it. Prints a table: registers, spills and shared memory
of each kernel, and whether it multiplies with wgmma. Must run without TRITON_INTERPRET.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tokenloom.kernels.byte_cache import CACHE_DTYPES, vector_width
from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    AttentionMetadata,
    AttentionSpec,
    BatchColumns,
    HeadNorms,
    Norm,
    NormKind,
    Rotary,
    Routing,
    StateMetadata,
)
from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.compile import compiling
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.gpu.rows import write_rows
from tokenloom.kernels.gpu.sampling.logprobs import logsumexp
from tokenloom.kernels.gpu.sampling.sampling import sample
from tokenloom.kernels.quantized import QuantizedWeight, Weight

ARCHITECTURES = (80, 90)
MIN_FP8_ARCHITECTURE = 89
# Per block (CUDA programming guide, table of capabilities). Consumer GPUs (86, 89, 120) get the shapes of 80, which
# itself has 163 KB.
MAX_SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}
NUM_KV_HEADS, BLOCK_SIZE, HIDDEN, INNER = 8, 16, 1024, 1536

empty = partial(torch.empty, device="meta")


@dataclass(frozen=True)
class Report:
    """ptxas's figures for one kernel."""

    label: str
    architecture: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    has_wgmma: bool


@dataclass(frozen=True)
class NoDevice:
    """The part of Triton's driver that compiling needs."""

    architecture: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # each architecture gets its own cache

    def get_current_stream(self, device: int) -> int:
        return 0


def step(decode_rows: int, prompts: Sequence[int]) -> AttentionMetadata:
    """Return the metadata of a step with decode rows in front of prompts of these lengths."""
    counts = [1] * decode_rows + list(prompts)
    starts = [0, *itertools.accumulate(counts)]
    positions, num_rows = empty(starts[-1], dtype=torch.int64), len(counts)
    return AttentionMetadata(
        positions=positions,
        slots=torch.empty_like(positions),
        query_starts=empty(num_rows + 1, dtype=torch.int32),
        seq_lens=empty(num_rows, dtype=torch.int32),
        block_tables=empty((num_rows, 64), dtype=torch.int32),
        num_decode_rows=decode_rows,
        query_starts_host=starts,
        seq_lens_host=counts,
    )


@dataclass(frozen=True)
class AttentionForm:
    """One kind of attention: the heads' norms and rotation, and the scores."""

    dtype: torch.dtype
    head_dim: int
    group: int
    window: int | None = None
    cache: str = "auto"  # a value of --kv-cache-dtype
    softcap: float = 0.0
    has_sinks: bool = False
    norm: NormKind | None = "rms"
    weights: str = "shared"  # by all heads; "per head", or "spanning" all heads of a token
    has_bias: bool = False
    is_after_rope: bool = False
    rotation: float = 1.0  # part of the elements of a head
    has_query_scale: bool = False
    has_spans: bool = False
    has_position_bias: bool = False

    @property
    def label(self) -> str:
        """The form in words, without its usual parts."""
        words = [f"{_name(self.dtype)} dim {self.head_dim} group {self.group}"]
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if value is True or (field.name in ("window", "softcap") and value):
                words.append(field.name.removeprefix("has_").removeprefix("is_").replace("_", " "))
            elif value != field.default:
                words.append(f"{field.name} {value}")
        return " ".join(words)

    def norms(self, num_heads: int) -> HeadNorms | None:
        if self.norm is None:
            return None
        made = []
        for count in (num_heads, NUM_KV_HEADS):
            vector = empty((self.head_dim,) if self.weights == "shared" else (count, self.head_dim))
            made.append(Norm(self.norm, vector, vector if self.has_bias else None, 1e-6))
        return HeadNorms(made[0], made[1], self.weights == "spanning", self.is_after_rope)


def attend(ops: TritonOps, form: AttentionForm) -> None:
    """Run a mixed step from the projected heads through attention."""
    head_dim, metadata, num_heads = form.head_dim, step(4, [300]), form.group * NUM_KV_HEADS
    heads = empty((304, num_heads + 2 * NUM_KV_HEADS, head_dim), dtype=form.dtype)
    rotary = Rotary(
        empty((64, int(head_dim * form.rotation))) if form.rotation else None,
        empty(64) if form.has_query_scale else None,
    )
    cache_dtype = CACHE_DTYPES.get(form.cache, form.dtype)
    shape = (9, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, vector_width(head_dim, cache_dtype))
    cache = empty(shape, dtype=cache_dtype)
    query = ops.qk_norm_rope_cache(heads, form.norms(num_heads), rotary, cache, 1, metadata)
    sinks = empty(num_heads) if form.has_sinks else None
    bias = empty((num_heads, 2047)) if form.has_position_bias else None
    spec = AttentionSpec(head_dim**-0.5, form.window, form.softcap, sinks, bias)
    if form.has_spans:
        metadata = replace(metadata, see_until=empty(304, dtype=torch.int32))
    ops.paged_attention(query, cache, 1, metadata, spec)


def around_attention(ops: TritonOps, dtype: torch.dtype) -> None:
    """Run the small operations of a model and of a step."""
    metadata, ids = step(4, []), empty(4, dtype=torch.int64)
    rows = BatchColumns(empty(9, dtype=torch.int64), empty(9, dtype=torch.int32), empty((2, 9, 64), dtype=torch.int32))
    for width in (HIDDEN, 5 * HIDDEN):
        table = empty((256, width), dtype=dtype)
        ops.embedding(ids.int(), table, 0)
        ops.begin_step(ids.int(), rows, table, 0)
        x = ops.begin_decode(ids, rows, [metadata] * 2, BLOCK_SIZE, table, 0)
        ops.add_norm(x, torch.empty_like(x), Norm("rms", empty(width), None, 1e-6))
        ops.add_norm(x, torch.empty_like(x), Norm("layer", empty(width), empty(width), 1e-6))
    for activation in (GATED_SILU, Activation("gelu_tanh", is_gated=True), Activation("gelu"), Activation("relu2")):
        ops.activate(empty((4, 2 * INNER), dtype=dtype), activation)
    for width, activation in ((HIDDEN, GATED_SILU), (HIDDEN, Activation("gelu")), (5 * HIDDEN, NO_ACTIVATION)):
        packed = ops.pack_linear(empty((2 * INNER, width), dtype=dtype), None, activation)
        ops.linear(empty((1, width), dtype=dtype), packed)
    ops.logits(empty((1, HIDDEN), dtype=dtype), ops.pack_linear(empty((INNER, HIDDEN), dtype=dtype), None))
    logsumexp(empty((4, 4096)))
    ones = empty(4, dtype=torch.float64)
    columns = empty(4), empty(4, dtype=torch.int32), ones, ones, empty((4, 2), dtype=torch.int32)
    sample(empty((4, 4096)), ids, columns, ids.int(), ids, ids)
    changes = ids, ids.int(), ids, ids, *columns, ids, ids.int()
    write_rows(changes, (rows.num_computed, rows.last_tokens, *columns, rows.block_tables))


def weight(kind: str, group_size: int, is_gathered: bool, shape: tuple[int, int], dtype: torch.dtype) -> Weight:
    """Return a matrix of `kind`: float, int8, fp8 or int4."""
    num_out, num_in = shape
    if kind == "float":
        return empty(shape, dtype=dtype)
    is_packed = kind == "int4"
    codes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}[kind]
    num_groups = num_in // group_size if group_size else 1
    return QuantizedWeight(
        empty((num_out, num_in // (1 + is_packed)), dtype=codes),
        empty((num_out, num_groups), dtype=torch.float16 if is_packed else torch.float32),
        empty((num_out, num_groups), dtype=torch.uint8) if is_packed else None,
        group_size or num_in,
        empty(num_in, dtype=torch.int32) if is_gathered else None,
        dtype,
    )


def multiply(
    ops: TritonOps, dtype: torch.dtype, kind: str, group_size: int, is_gathered: bool, num_rows: int, num_experts: int
) -> None:
    """Multiply by one matrix, or by the matrices of each row's experts."""
    x, make = empty((num_rows, HIDDEN), dtype=dtype), partial(weight, kind, group_size, is_gathered, dtype=dtype)
    if not num_experts:
        ops.linear(x, ops.pack_linear(make((INNER, HIDDEN)), None))
        return
    packed = ops.pack_experts([make((2 * INNER, HIDDEN))] * num_experts, [make((HIDDEN, INNER))] * num_experts)
    ops.fused_moe(x, empty((num_rows, num_experts), dtype=dtype), packed, Routing(8, is_normalized=True))


def mix_experts(ops: TritonOps, dtype: torch.dtype) -> None:
    """Run experts with biases and a clamped activation, chosen from the best groups."""
    x, num_experts, make = empty((16, HIDDEN), dtype=dtype), 64, partial(empty, dtype=dtype)
    biases = make((num_experts, 2 * INNER)), make((num_experts, HIDDEN))
    matrices = [make((2 * INNER, HIDDEN))] * num_experts, [make((HIDDEN, INNER))] * num_experts
    packed = ops.pack_experts(*matrices, biases, Activation("swiglu_clamped", is_gated=True, limit=7.0))
    for routing in (
        Routing(8, "sigmoid", empty(num_experts), 8, 4, "top2", is_normalized=True, scale=2.5),
        Routing(4, "softmax_of_chosen"),
    ):
        ops.fused_moe(x, make((16, num_experts)), packed, routing)


def adapt(ops: TritonOps, dtype: torch.dtype, num_rows: int, num_experts: int) -> None:
    """Multiply rows with adapters: by a layer of three parts, a gated one and the head, or by experts; look them up."""
    make = partial(empty, dtype=dtype)
    space = ops.adapter_space(8, 64)
    space.begin_step(empty(num_rows, dtype=torch.int32))
    x = make((num_rows, HIDDEN))
    if num_experts:
        packed = ops.pack_experts([make((2 * INNER, HIDDEN))] * num_experts, [make((HIDDEN, INNER))] * num_experts)
        space.attach_experts(packed, 2)
        ops.fused_moe(x, make((num_rows, num_experts)), packed, Routing(8))
        return
    for num_parts, activation, bias in ((3, NO_ACTIVATION, make(2 * INNER)), (2, GATED_SILU, None)):
        linear = ops.pack_linear(make((2 * INNER, HIDDEN)), bias, activation)
        space.attach(linear, num_parts)
        ops.linear(x, linear)
    head = ops.pack_linear(make((INNER, HIDDEN)), None)
    space.attach(head, 1)
    ops.logits(x, head)
    table = make((256, HIDDEN))
    space.attach_embedding(table, 0)
    ops.embedding(empty(num_rows, dtype=torch.int32), table, 0)


def mix_states(ops: TritonOps, dtype: torch.dtype, key_dim: int, value_dim: int, has_beta: bool) -> None:
    """Run the operations of a layer with a state: a delta net, or Mamba2 without `has_beta`."""
    num_tokens, key_heads, value_heads, num_taps = 40, 16, 32, 4
    numbers = partial(empty, dtype=torch.int32)
    metadata = StateMetadata(numbers(3), numbers(2), numbers(2))
    x, weight = empty((num_tokens, HIDDEN), dtype=dtype), empty((HIDDEN, num_taps))
    conv_states = empty((9, num_taps - 1, HIDDEN), dtype=dtype)
    ops.causal_conv(x, weight, None if has_beta else empty(HIDDEN), "silu", conv_states, metadata)
    heads = empty((num_tokens, key_heads, key_dim), dtype=dtype)
    values = empty((num_tokens, value_heads, value_dim), dtype=dtype)
    decay = empty((num_tokens, value_heads))
    states = empty((9, value_heads, key_dim, value_dim))
    read = ops.state_scan(heads, heads, values, decay, decay if has_beta else None, states, metadata).flatten(1)
    if has_beta:
        ops.gated_norm(read, read, Norm("rms", empty(value_dim), None, 1e-6), value_heads, "norm_then_silu")
    else:
        ops.gated_norm(read, read, Norm("rms", empty(read.shape[1]), None, 1e-6), 1, "silu_then_norm")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_STATES = [(BF16, 128, 128, True), (BF16, 128, 64, False), (FP32, 256, 128, True), (BF16, 16, 64, False)]
_ATTENTION = [
    AttentionForm(BF16, 128, 2),
    AttentionForm(
        BF16, 64, 8, 128, softcap=50.0, has_sinks=True, norm="layer", weights="per head", has_bias=True,
        is_after_rope=True, rotation=0.5, has_query_scale=True,
    ),
    AttentionForm(BF16, 128, 1, weights="spanning"),
    AttentionForm(BF16, 128, 7),
    AttentionForm(FP16, 128, 4, 96),
    AttentionForm(BF16, 64, 8),
    AttentionForm(BF16, 80, 1),
    AttentionForm(BF16, 256, 4, 96),
    AttentionForm(BF16, 256, 2, 96, has_spans=True),
    AttentionForm(BF16, 64, 1, norm=None, rotation=0.0, has_spans=True, has_position_bias=True),
    AttentionForm(FP32, 128, 2),
    AttentionForm(BF16, 64, 8, 128, has_sinks=True, norm=None),
    AttentionForm(BF16, 256, 2, 96, softcap=50.0, norm=None),
    AttentionForm(BF16, 128, 2, softcap=50.0, norm=None, rotation=0.0),
    AttentionForm(FP32, 128, 2, softcap=50.0, has_sinks=True, norm="layer", rotation=0.25),
    AttentionForm(BF16, 512, 8),
    AttentionForm(FP32, 512, 16),
    AttentionForm(BF16, 64, 71, norm=None),
    AttentionForm(BF16, 128, 48, norm=None),
]  # fmt: skip
_FP8_ATTENTION = [
    AttentionForm(BF16, 128, 2, cache="fp8"),
    AttentionForm(BF16, 128, 4, cache="int8"),
    AttentionForm(BF16, 64, 8, cache="int8"),
    AttentionForm(BF16, 128, 8, cache="fp8"),
    AttentionForm(BF16, 64, 8, cache="fp8"),
    AttentionForm(BF16, 256, 4, cache="fp8"),
    AttentionForm(BF16, 80, 4, cache="fp8", softcap=50.0, has_sinks=True, norm="layer", rotation=0.5),
]
_PRODUCTS = [  # element, kind, group size (0: all), whether groups are gathered, rows, experts
    (BF16, "int4", 128, False, 16, 0),
    (BF16, "float", 0, False, 64, 16),
    (BF16, "int4", 128, False, 2048, 0),
    (BF16, "int4", 128, True, 16, 0),
    (BF16, "int8", 0, False, 16, 0),
    (BF16, "int8", 0, False, 2048, 0),
    (BF16, "fp8", 128, False, 16, 0),
    (FP16, "fp8", 0, False, 2048, 0),
    (FP32, "int8", 0, False, 16, 0),
    (BF16, "int4", 128, False, 16, 64),
    (BF16, "fp8", 128, False, 64, 16),
]

_ADAPTED = [(BF16, 16, 0), (BF16, 1, 0), (BF16, 4096, 0), (FP32, 16, 0), (BF16, 16, 64)]  # element, rows, experts


def forms(architecture: int, is_quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the launches of common models with their labels; `is_quick`: three forms of attention, two products."""
    ops, batch_invariant = TritonOps(architecture), BatchInvariantTritonOps(architecture)
    yield "bf16", partial(around_attention, ops, BF16)
    for form in _ATTENTION[: 3 if is_quick else None]:
        yield form.label, partial(attend, ops, form)
    plain = AttentionForm(BF16, 128, 2, norm=None)
    yield f"{plain.label} batch_invariant", partial(attend, batch_invariant, plain)
    if architecture >= MIN_FP8_ARCHITECTURE:
        for form in _FP8_ATTENTION[: 1 if is_quick else None]:
            yield form.label, partial(attend, ops, form)
    for dtype in (BF16, FP32):
        yield _name(dtype), partial(multiply, batch_invariant, dtype, "float", 0, False, 16, 0)
    yield "bf16 experts with biases", partial(mix_experts, ops, BF16)
    for dtype, key_dim, value_dim, has_beta in _STATES[: 2 if is_quick else None]:
        label = f"{_name(dtype)} {'delta' if has_beta else 'mamba2'} states {key_dim} x {value_dim}"
        yield label, partial(mix_states, ops, dtype, key_dim, value_dim, has_beta)
    for dtype, num_rows, num_experts in _ADAPTED[: 1 if is_quick else None]:
        label = f"{_name(dtype)} adapters{' experts' * (num_experts > 0)}, {num_rows} rows"
        yield label, partial(adapt, TritonOps(architecture), dtype, num_rows, num_experts)
    for dtype, kind, group_size, is_gathered, num_rows, num_experts in _PRODUCTS[: 2 if is_quick else None]:
        label = f"{_name(dtype)} x {kind}{' gathered' * is_gathered}{' experts' * (num_experts > 0)}, {num_rows} rows"
        yield label, partial(multiply, ops, dtype, kind, group_size, is_gathered, num_rows, num_experts)


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


def compile_forms(architecture: int, is_quick: bool, first: int, every: int) -> Iterator[Report]:
    """Yield a report for each kernel that the forms, of `every` one from number `first` on, launch, once per kernel."""
    triton.runtime.driver.set_active(NoDevice(architecture))
    launched: list[str] = []  # label of the form of each launch
    with ThreadPoolExecutor(os.cpu_count()) as threads, compiling(threads) as kernels:
        for form, launch in itertools.islice(forms(architecture, is_quick), first, None, every):
            launch()
            launched.extend([form] * (len(kernels) - len(launched)))
    for form, kernel in zip(launched, kernels.values(), strict=True):
        yield _report(form, architecture, kernel)


def _report(form: str, architecture: int, compiled: Any) -> Report:
    label = f"{compiled.metadata.name.removesuffix('_kernel')} {form}"
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    has_wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    return Report(label, architecture, registers, spill_bytes, compiled.metadata.shared, has_wgmma)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread and the bytes of the stack frame (spilled registers)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=60).stdout
    registers, stack = re.search(r"REG:(\d+)", output), re.search(r"STACK:(\d+)", output)
    assert registers is not None and stack is not None, output
    return int(registers[1]), int(stack[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels ahead of time and print their resources.")
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--quick", action="store_true", help="attention in one form only")
    parser.add_argument("--first", type=int, default=0, help="number of the first form")
    parser.add_argument("--every", type=int, default=1, help="compile one of so many forms")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    if not options.json:
        print(f"{'kernel':48} {'sm':>3} {'registers':>9} {'spill B':>8} {'shared B':>9} wgmma")
    with torch.inference_mode():
        for architecture in options.architectures:
            for report in compile_forms(architecture, options.quick, options.first, options.every):
                print(json.dumps(asdict(report)) if options.json else _line(report), flush=True)


def _line(report: Report) -> str:
    numbers = f"{report.registers:9} {report.spill_bytes:8} {report.shared_bytes:9}"
    return f"{report.label:48} {report.architecture:3} {numbers} {'yes' if report.has_wgmma else 'no'}"


if __name__ == "__main__":
    main()
