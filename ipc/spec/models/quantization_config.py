"""QuantizationConfig: storage format of a checkpoint's matrices, parsed from `quantization_config` in config.json.

Formats: AWQ (arXiv 2306.00978, AutoAWQ's "gemm"), GPTQ (arXiv 2210.17323, AutoGPTQ's and GPTQModel's), FP8 of
DeepSeek-V3 and AutoFP8, FBGEMM's FP8, compressed-tensors, MXFP4 of experts (gpt-oss), and GGUF. A checkpoint's settings
for the quantization of activations are ignored; the option --quantized-products decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from .config_file import ConfigFile, shown

GGUF_ROUNDING = 1  # raised with each change of the codes that are packed from blocks; 0: most were rounded to 8 bits


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The format of all quantized matrices; the tensors in the checkpoint show which matrices are quantized."""

    layout: Literal[
        "on_load", "scaled", "awq", "gptq", "packed", "mxfp4", "gguf"
    ]  # on_load: stored unquantized, quantized by us
    weight_dtype: Literal["int8", "fp8", "int4", "mxfp4"]
    block: tuple[int, int] | None = None  # scaled: (outputs, inputs) per scale; None: a scale per output or tensor
    group_size: int | None = None  # int4: inputs per scale; None: all
    zero_offset: int = 0  # gptq: added to stored zero points
    rounding: int = 0  # on_load, gguf: number of the way to round, since other codes give other answers and KV blocks


def parse_quantization(file: ConfigFile) -> QuantizationConfig | None:
    """Parse quantization_config; None if it is empty. ConfigError for an unsupported format."""
    raw = file.part("quantization_config")
    if not raw.fields():
        return None
    method = str(raw.get("quant_method"))
    if method not in _PARSERS:
        known = ", ".join(sorted(_PARSERS))
        file.refuse(
            f"quantization method {method:.100} ({raw.spelled('quant_method')}) is not supported, known are {known}"
        )
    try:
        return _PARSERS[method](raw)
    except _Unsupported as error:
        file.refuse(f"quantization_config of {method} with {error} is not supported")


class _Unsupported(Exception):
    """Error: an unsupported setting of a supported method."""


def _expect(raw: ConfigFile, name: str, *known: object, default: object = None) -> Any:
    value = raw.get(name, default)
    if value not in known:
        raise _Unsupported(f"{name} {shown(value)}")
    return value


def _group_size(raw: ConfigFile, *, is_needed: bool = False) -> int | None:
    size = raw.whole("group_size", -1, least=-1)
    if size == 0 or (is_needed and "group_size" not in raw.fields()):
        raise _Unsupported("group_size 0" if size == 0 else "no group_size")
    return size if size > 0 else None


def _awq(raw: ConfigFile) -> QuantizationConfig:
    _expect(raw, "bits", 4)
    _expect(raw, "zero_point", True, default=True)
    version = (raw.text("version") or raw.text("format") or "gemm").lower()
    if version != "gemm":
        raise _Unsupported(f"version {version:.100}")
    return QuantizationConfig(layout="awq", weight_dtype="int4", group_size=_group_size(raw, is_needed=True))


def _gptq(raw: ConfigFile) -> QuantizationConfig:
    _expect(raw, "bits", 4)
    name = "checkpoint_format" if raw.get("checkpoint_format") else "format"  # the first since transformers 5
    checkpoint_format = _expect(raw, name, "gptq", "gptq_v2", default="gptq")
    if raw.get("dynamic"):
        raise _Unsupported("different settings per layer (dynamic)")
    offset = 1 if checkpoint_format == "gptq" else 0
    return QuantizationConfig(
        layout="gptq", weight_dtype="int4", group_size=_group_size(raw, is_needed=True), zero_offset=offset
    )


def _fp8(raw: ConfigFile) -> QuantizationConfig:
    _expect(raw, "fmt", "e4m3", default="e4m3")
    _expect(raw, "expert_dtype", None, "fp8")
    return QuantizationConfig(layout="scaled", weight_dtype="fp8", block=_block(raw, "weight_block_size"))


def _fbgemm_fp8(raw: ConfigFile) -> QuantizationConfig:
    return QuantizationConfig(layout="scaled", weight_dtype="fp8")


def _compressed_tensors(raw: ConfigFile) -> QuantizationConfig:
    for name in ("transform_config", "sparsity_config"):  # rotations at run time; weights stored without zeros
        if raw.part(name).fields() and raw.part(name).get("format") != "dense":
            raise _Unsupported(name)
    groups = raw.part("config_groups")
    weights = [groups.part(name).part("weights") for name in groups.fields()]
    if not weights or any(each.fields() != weights[0].fields() for each in weights):
        raise _Unsupported(f"{len(weights)} groups of layers with different settings (config_groups)")
    scheme = weights[0]
    kind, bits = scheme.text("type"), scheme.positive("num_bits")
    strategy = _expect(scheme, "strategy", "tensor", "channel", "group", "block")
    if not scheme.flag("symmetric", True):
        raise _Unsupported("zero points (symmetric false)")
    if (kind, bits) == ("int", 4) and strategy in ("channel", "group"):
        _expect(raw, "format", "pack-quantized")
        return QuantizationConfig(layout="packed", weight_dtype="int4", group_size=_group_size(scheme))
    if bits != 8 or kind not in ("int", "float"):
        raise _Unsupported(f"type {kind:.100} of num_bits {bits}, strategy {strategy}")
    _expect(raw, "format", "float-quantized", "int-quantized", "naive-quantized")
    size = _group_size(scheme) if strategy == "group" else None
    block = (1, size) if size is not None else _block(scheme, "block_structure")
    return QuantizationConfig(layout="scaled", weight_dtype="int8" if kind == "int" else "fp8", block=block)


def _mxfp4(raw: ConfigFile) -> QuantizationConfig:
    return QuantizationConfig(layout="mxfp4", weight_dtype="mxfp4")


def _gguf(raw: ConfigFile) -> QuantizationConfig:
    return QuantizationConfig(layout="gguf", weight_dtype="int4", rounding=GGUF_ROUNDING)


def _block(raw: ConfigFile, name: str) -> tuple[int, int] | None:
    if name not in raw:
        return None
    sizes = raw.wholes(name, least=1)
    if len(sizes) != 2:
        raise _Unsupported(f"{name} {shown(sizes)}")
    return sizes[0], sizes[1]


_PARSERS: dict[str, Callable[[ConfigFile], QuantizationConfig]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}
