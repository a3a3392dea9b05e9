"""Compile the Triton kernels ahead of time, for any architecture and without a GPU.

    python -m tokenloom.kernels.gpu_compile [--architectures 80 90]

prints a table: registers, spills and shared memory of each kernel, and whether it multiplies with wgmma. Must run
without TRITON_INTERPRET.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import (
    triton_activation,
    triton_decode,
    triton_embedding,
    triton_experts,
    triton_heads,
    triton_linear,
    triton_logprobs,
    triton_matmul,
    triton_norm,
    triton_prefill,
    triton_sampling,
    triton_step,
)
from .triton_table import decode_shape, prefill_shape

ARCHITECTURES = (80, 90)
MIN_FP8_ARCHITECTURE = 89
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # of one block (CUDA programming guide, table of capabilities)

_PAGED = {"query": "*E", "kv_cache": "*E", "scales": "*E", "block_tables": "*i32", "seq_lens": "*i32"}
_STRIDES = dict.fromkeys(("layer_offset", "block_stride", "query_stride", "table_stride"), "i32")
_SCORES = {"scale": "fp32", "cap": "fp32", "window": "i32"}


class Kernel(Protocol):
    """A @triton.jit function."""

    arg_names: list[str]
    __name__: str


@dataclass(frozen=True)
class Build:
    """One specialisation: `arguments` are Triton's types by name, in which E is the element type."""

    label: str
    kernel: Kernel
    element: str  # fp16, bf16 or fp32
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True)
class Report:
    """What ptxas says of one build."""

    label: str
    architecture: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    has_wgmma: bool


def builds(architecture: int, is_quick: bool = False) -> Iterator[Build]:
    """Every kernel, in the forms that common models launch; `is_quick`: attention in one form only."""
    for element, head_dim, group, window in _ATTENTION_FORMS[: 1 if is_quick else None]:
        yield _decode(architecture, element, head_dim, group, window)
        yield _prefill(architecture, element, head_dim, group, window)
    prefill = _prefill(architecture, "bf16", 128, 2, False)
    yield replace(prefill, label=f"{prefill.label} uniform", constants={**prefill.constants, "IS_UNIFORM": True})
    yield from (_linear(element) for element in ("bf16", "fp32"))
    yield from _merges()
    yield from _matmuls(is_quick)
    yield from _experts()
    yield from _small_ops()
    if architecture >= MIN_FP8_ARCHITECTURE:
        for head_dim, group in ((128, 2), (128, 8), (64, 8), (256, 4))[: 1 if is_quick else None]:
            yield _with_fp8_cache(_decode(architecture, "bf16", head_dim, group, False))
            yield _with_fp8_cache(_prefill(architecture, "bf16", head_dim, group, False))
        yield _with_fp8_cache(_prepare_heads(True))


def _with_fp8_cache(build: Build) -> Build:
    return replace(
        build,
        label=f"{build.label} fp8 cache",
        arguments={**build.arguments, "kv_cache": "*fp8e4nv", "scales": "*fp32"},
        constants={**build.constants, "IS_FP8": True},
    )


_ATTENTION_FORMS = [
    ("bf16", 128, 2, False),
    ("bf16", 128, 7, False),
    ("fp16", 128, 4, True),
    ("bf16", 64, 8, False),
    ("bf16", 80, 1, False),
    ("bf16", 256, 4, True),
    ("fp32", 128, 2, False),
]


def _attention_constants(head_dim: int, has_window: bool) -> dict[str, object]:
    dim_pad = 1 << (head_dim - 1).bit_length()
    return {
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "DIM_PAD": dim_pad,
        "BLOCK_SIZE": 16,
        "HAS_WINDOW": has_window,
        "HAS_CAP": False,
        "IS_FP8": False,
    }


def _decode(architecture: int, element: str, head_dim: int, group: int, has_window: bool) -> Build:
    shape = decode_shape(architecture, head_dim, group, _BYTES[element])
    constants = _attention_constants(head_dim, has_window) | {
        "GROUP": group,
        "GROUP_PAD": 16,
        "TILE": shape.tile,
        "MIN_TILES": shape.min_tiles,
        "CHUNKS": triton_decode.MAX_CHUNKS,
    }
    own = {"items": "*i32", "output": "*E", "partials": "*fp32", "partial_logs": "*fp32"}
    label = f"decode {element} dim {head_dim} group {group}{' window' * has_window}"
    arguments = _PAGED | own | _SCORES | _STRIDES
    return Build(label, triton_decode.decode_kernel, element, arguments, constants, shape.num_warps, shape.num_stages)


def _prefill(architecture: int, element: str, head_dim: int, group: int, has_window: bool) -> Build:
    shape = prefill_shape(architecture, head_dim, group, _BYTES[element])
    constants = _attention_constants(head_dim, has_window) | {
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "IS_UNIFORM": False,
        "TILE": shape.tile,
    }
    own = {"query_starts": "*i32", "tiles": "*i32", "output": "*E"}
    label = f"prefill {element} dim {head_dim} group {group}{' window' * has_window}"
    arguments = _PAGED | own | _SCORES | _STRIDES
    return Build(label, triton_prefill.prefill_kernel, element, arguments, constants, shape.num_warps, shape.num_stages)


def _merges() -> Iterator[Build]:
    split = {"TILE": 64, "MIN_TILES": 4, "CHUNKS": triton_decode.MAX_CHUNKS, "HAS_WINDOW": False}
    lengths = {"seq_lens": "*i32", "window": "i32"}
    yield Build(
        "decode plan",
        triton_decode.plan_kernel,
        "bf16",
        lengths | {"items": "*i32", "num_rows": "i32"},
        split | {"ROWS_PAD": 256},
        num_warps=4,
    )
    yield Build(
        "decode merge",
        triton_decode.merge_kernel,
        "bf16",
        lengths | {"partials": "*fp32", "partial_logs": "*fp32", "output": "*E"},
        split | {"NUM_HEADS": 16, "HEAD_DIM": 128, "DIM_PAD": 128},
        num_warps=2,
    )


_MATMUL_FORMS = [  # element, kind, group size, whether groups are gathered, rows, chosen experts
    ("bf16", "int4", 128, False, 16, 0),
    ("bf16", "float", 0, False, 64, 8),
    ("bf16", "int4", 128, False, 2048, 0),
    ("bf16", "int4", 128, True, 16, 0),
    ("bf16", "int8", 0, False, 16, 0),
    ("bf16", "int8", 0, False, 2048, 0),
    ("bf16", "fp8", 128, False, 16, 0),
    ("fp16", "fp8", 0, False, 2048, 0),
    ("fp32", "int8", 0, False, 16, 0),
    ("bf16", "float", 0, False, 16, 8),
    ("bf16", "int4", 128, False, 16, 8),
    ("bf16", "fp8", 128, False, 64, 8),
]


def _matmuls(is_quick: bool) -> Iterator[Build]:
    for element, kind, group_size, is_gathered, num_rows, num_chosen in _MATMUL_FORMS[: 2 if is_quick else None]:
        num_groups = 4096 // group_size if group_size else 1
        shape = triton_matmul.matmul_shape(num_rows, _BYTES[element], group_size or 4096, num_groups)
        arguments = dict.fromkeys(("x", "bias", "output"), "*E") | {
            "codes": {"float": "*E", "int8": "*i8"}.get(kind, "*u8"),
            "scales": "*fp16" if kind == "int4" else "*fp32",
            "zeros": "*u8",
            "groups": "*i32",
            "rows": "*i32",
            "counts": "*i32",
            "row_scales": "*fp32",
            "num_rows": "i32",
            "x_stride": "i32",
        }
        constants = {
            "IN": 4096,
            "OUT": 1536,
            "NUM_GROUPS": num_groups,
            "GROUP_SIZE": group_size or 4096,
            "NUM_CHOSEN": num_chosen or 1,
            "KIND": kind,
            "HAS_ZEROS": kind == "int4",
            "IS_GATHERED": is_gathered,
            "HAS_BIAS": False,
            "HAS_EXPERTS": num_chosen > 0,
            "IS_WEIGHTED": False,
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "BLOCK_K": shape.block_k,
        }
        label = f"matmul {element} x {kind}{' gathered' * is_gathered}{' experts' * (num_chosen > 0)}, {num_rows} rows"
        yield Build(
            label, triton_matmul.matmul_kernel, element, arguments, constants, shape.num_warps, shape.num_stages
        )


def _experts() -> Iterator[Build]:
    yield Build(
        "route",
        triton_experts.route_kernel,
        "bf16",
        {"scores": "*E", "weights": "*fp32", "experts": "*i32"},
        {"NUM_EXPERTS": 128, "EXPERTS_PAD": 128, "NUM_CHOSEN": 8, "CHOSEN_PAD": 8, "IS_NORMALIZED": True},
        num_warps=1,
    )
    yield Build(
        "list_rows",
        triton_experts.list_rows_kernel,
        "bf16",
        {"experts": "*i32", "rows": "*i32", "counts": "*i32", "num_tokens": "i32", "num_choices": "i32"},
        {"CHUNK": triton_experts.CHUNK},
        num_warps=4,
    )


def _small_ops() -> Iterator[Build]:
    norm = dict.fromkeys(("x", "residual", "weight", "output"), "*E") | {"x_stride": "i32", "eps": "fp32"}
    for width, num_warps in ((1024, 4), (5120, 8)):
        constants: dict[str, object] = {
            "WIDTH": width,
            "WIDTH_PAD": 1 << (width - 1).bit_length(),
            "IS_ADDED": True,
        }
        yield Build(f"add_rms_norm {width}", triton_norm.rms_norm_kernel, "bf16", norm, constants, num_warps)
    yield Build(
        "silu_and_mul",
        triton_activation.silu_and_mul_kernel,
        "bf16",
        {"x": "*E", "output": "*E"},
        {"WIDTH": 3072, "BLOCK": 1024},
        num_warps=4,
    )
    yield Build(
        "embedding",
        triton_embedding.embedding_kernel,
        "bf16",
        {"token_ids": "*i64", "table": "*E", "output": "*E", "first_id": "i32", "num_rows": "i32"},
        {"WIDTH": 1024, "BLOCK": 1024},
        num_warps=4,
    )
    yield from (_prepare_heads(has_norm) for has_norm in (False, True))
    yield Build(
        "sample",
        triton_sampling.sample_kernel,
        "fp32",
        triton_sampling.ARGUMENT_TYPES,
        {"BLOCK": triton_sampling.BLOCK, "PART": triton_sampling.PART},
        num_warps=triton_sampling.NUM_WARPS,
    )
    yield Build(
        "log_totals",
        triton_logprobs.log_totals_kernel,
        "fp32",
        {"logits": "*E", "output": "*E", "vocab_size": "i32", "row_stride": "i32"},
        {"BLOCK": 4096},
        num_warps=8,
    )
    yield Build(
        "prepare_step",
        triton_step.prepare_step_kernel,
        "bf16",
        triton_step.ARGUMENT_TYPES,
        {"BLOCK_SIZE": 16, "BLOCK": triton_step.BLOCK},
        num_warps=4,
    )


def _linear(element: str) -> Build:
    shape = triton_linear.linear_shape(_BYTES[element])
    arguments = dict.fromkeys(("x", "weight", "bias", "output"), "*E") | {
        "num_rows": "i32",
        "num_outputs": "i32",
        "x_stride": "i32",
    }
    constants = {"INPUTS": 1024, "ROWS": shape.rows, "OUTPUTS": shape.outputs, "INNER": shape.inner, "HAS_BIAS": True}
    label = f"deterministic linear {element}"
    return Build(label, triton_linear.linear_kernel, element, arguments, constants, shape.num_warps, shape.num_stages)


def _prepare_heads(has_norm: bool) -> Build:
    arguments = dict.fromkeys(("heads", "query_norm", "key_norm", "kv_cache", "scales"), "*E") | {
        "cos_sin": "*fp32",
        "positions": "*i64",
        "slots": "*i64",
        "eps": "fp32",
        "layer_offset": "i32",
        "block_stride": "i32",
        "token_stride": "i32",
    }
    shape = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF_PAD": 64, "BLOCK_SIZE": 16, "HEADS": 4}
    constants: dict[str, object] = {**shape, "HAS_NORM": has_norm, "IS_FP8": False}
    label = f"prepare_heads{' with norms' * has_norm}"
    return Build(label, triton_heads.prepare_heads_kernel, "bf16", arguments, constants, num_warps=2)


_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def compile_build(build: Build, architecture: int) -> Report:
    """Compile one build and read what it takes from ptxas."""
    signature = {
        name: "constexpr" if name in build.constants else build.arguments[name].replace("*E", f"*{build.element}")
        for name in build.kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]  # torch's allocations and the strides of all supported models
    attributes = {
        (index,): aligned
        for index, name in enumerate(build.kernel.arg_names)
        if signature[name].startswith("*") or name.endswith(("_stride", "_offset"))
    }
    source = ASTSource(build.kernel, signature, dict(build.constants), attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    has_wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    return Report(build.label, architecture, registers, spill_bytes, compiled.metadata.shared, has_wgmma)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack frame: what spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack = re.search(r"REG:(\d+)", output), re.search(r"STACK:(\d+)", output)
    assert registers is not None and stack is not None, output
    return int(registers[1]), int(stack[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels ahead and print what they take.")
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--quick", action="store_true", help="attention in one form only")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    if not options.json:
        print(f"{'kernel':42} {'sm':>3} {'registers':>9} {'spill B':>8} {'shared B':>9} wgmma")
    for architecture in options.architectures:
        for build in builds(architecture, options.quick):
            report = compile_build(build, architecture)
            print(json.dumps(asdict(report)) if options.json else _line(report), flush=True)


def _line(report: Report) -> str:
    numbers = f"{report.registers:9} {report.spill_bytes:8} {report.shared_bytes:9}"
    return f"{report.label:42} {report.architecture:3} {numbers} {'yes' if report.has_wgmma else 'no'}"


if __name__ == "__main__":
    main()
