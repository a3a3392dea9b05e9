"""QuantizationConfig: storage format of a checkpoint's matrices, parsed from `quantization_config` in config.json.

Formats: AWQ (arXiv 2306.00978, AutoAWQ's "gemm"), GPTQ (arXiv 2210.17323, AutoGPTQ's and GPTQModel's), FP8 of
DeepSeek-V3 and AutoFP8, FBGEMM's FP8, compressed-tensors, MXFP4 of experts (gpt-oss), and GGUF. Activations are never
quantized: settings for them are ignored, and products are more precise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ConfigError


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The format of all quantized matrices; the tensors in the checkpoint tell which matrices are quantized."""

    layout: Literal[
        "on_load", "scaled", "awq", "gptq", "packed", "mxfp4", "gguf"
    ]  # on_load: stored unquantized, quantized by us
    weight_dtype: Literal["int8", "fp8", "int4", "mxfp4"]
    block: tuple[int, int] | None = None  # scaled: (outputs, inputs) per scale; None: a scale per output or tensor
    group_size: int | None = None  # int4: inputs per scale; None: all
    zero_offset: int = 0  # gptq: added to stored zero points


def parse_quantization(raw: dict[str, Any] | None, path: Path) -> QuantizationConfig | None:
    """Parse `raw`, the quantization_config of `path`; None if it is empty. ConfigError for an unsupported format."""
    if not raw:
        return None
    method = str(raw.get("quant_method"))
    if method not in _PARSERS:
        known = ", ".join(sorted(_PARSERS))
        raise ConfigError(f"{path}: quantization method {method} is not supported, known are {known}")
    try:
        return _PARSERS[method](raw)
    except _Unsupported as error:
        raise ConfigError(f"{path}: {method} with {error} is not supported") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: quantization_config of {method} cannot be read ({type(error).__name__}: {error})"
        ) from None


class _Unsupported(Exception):
    """A setting of a supported method that is not supported."""


def _expect(raw: dict[str, Any], name: str, *known: object, default: object = None) -> Any:
    value = raw.get(name, default)
    if value not in known:
        raise _Unsupported(f"{name} {value!r}")
    return value


def _group_size(value: object) -> int | None:
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or value < 1:
        raise _Unsupported(f"group_size {value!r}")
    return value


def _awq(raw: dict[str, Any]) -> QuantizationConfig:
    _expect(raw, "bits", 4)
    _expect(raw, "zero_point", True, default=True)
    version = str(raw.get("version") or raw.get("format") or "gemm").lower()
    if version != "gemm":
        raise _Unsupported(f"version {version}")
    return QuantizationConfig(layout="awq", weight_dtype="int4", group_size=_group_size(raw["group_size"]))


def _gptq(raw: dict[str, Any]) -> QuantizationConfig:
    _expect(raw, "bits", 4)
    name = "checkpoint_format" if raw.get("checkpoint_format") else "format"  # transformers' since 5
    checkpoint_format = _expect(raw, name, "gptq", "gptq_v2", default="gptq")
    if raw.get("dynamic"):
        raise _Unsupported("different settings per layer (dynamic)")
    offset = 1 if checkpoint_format == "gptq" else 0
    return QuantizationConfig(
        layout="gptq", weight_dtype="int4", group_size=_group_size(raw["group_size"]), zero_offset=offset
    )


def _fp8(raw: dict[str, Any]) -> QuantizationConfig:
    _expect(raw, "fmt", "e4m3", default="e4m3")
    _expect(raw, "expert_dtype", None, "fp8")
    return QuantizationConfig(layout="scaled", weight_dtype="fp8", block=_block(raw.get("weight_block_size")))


def _fbgemm_fp8(raw: dict[str, Any]) -> QuantizationConfig:
    return QuantizationConfig(layout="scaled", weight_dtype="fp8")


def _compressed_tensors(raw: dict[str, Any]) -> QuantizationConfig:
    for name in ("transform_config", "sparsity_config"):  # rotations at run time; weights stored without zeros
        if raw.get(name) and raw[name].get("format") != "dense":
            raise _Unsupported(name)
    groups = list(raw["config_groups"].values())
    weights = [group["weights"] for group in groups]
    if not weights or any(each != weights[0] for each in weights):
        raise _Unsupported(f"{len(groups)} groups of layers with different settings")
    scheme = weights[0]
    kind, bits = scheme["type"], scheme["num_bits"]
    strategy = _expect(scheme, "strategy", "tensor", "channel", "group", "block")
    if not scheme.get("symmetric", True):
        raise _Unsupported("zero points (symmetric false)")
    if (kind, bits) == ("int", 4) and strategy in ("channel", "group"):
        _expect(raw, "format", "pack-quantized")
        return QuantizationConfig(
            layout="packed", weight_dtype="int4", group_size=_group_size(scheme.get("group_size"))
        )
    if bits != 8 or kind not in ("int", "float"):
        raise _Unsupported(f"{kind} of {bits} bits, strategy {strategy}")
    _expect(raw, "format", "float-quantized", "int-quantized", "naive-quantized")
    size = _group_size(scheme.get("group_size")) if strategy == "group" else None
    block = (1, size) if size is not None else _block(scheme.get("block_structure"))
    return QuantizationConfig(layout="scaled", weight_dtype="int8" if kind == "int" else "fp8", block=block)


def _mxfp4(raw: dict[str, Any]) -> QuantizationConfig:
    return QuantizationConfig(layout="mxfp4", weight_dtype="mxfp4")


def _gguf(raw: dict[str, Any]) -> QuantizationConfig:
    return QuantizationConfig(layout="gguf", weight_dtype="int4")


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    rows, columns = (int(size) for size in value)
    if min(rows, columns) < 1:
        raise _Unsupported(f"blocks of {rows} x {columns}")
    return rows, columns


_PARSERS: dict[str, Callable[[dict[str, Any]], QuantizationConfig]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}
