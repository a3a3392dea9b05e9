"""quantization_config is parsed for supported methods; any other is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.config_file import ConfigFile
from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig, parse_quantization

PATH = Path("/m/config.json")


def file_of(raw: object) -> ConfigFile:
    return ConfigFile(PATH, {"quantization_config": raw})


def four_bits(method: str, group_size: int = 32, **fields: object) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": group_size, **fields}


def compressed(file_format: str = "int-quantized", **weights: object) -> dict[str, Any]:
    scheme = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": {"weights": scheme, "targets": ["Linear"]}},
    }


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            four_bits("awq", 128, version="GEMM"),
            QuantizationConfig(layout="awq", weight_dtype="int4", group_size=128),
        ),
        (
            four_bits("gptq", -1, desc_act=True),
            QuantizationConfig(layout="gptq", weight_dtype="int4", zero_offset=1),
        ),
        (
            four_bits("gptq", checkpoint_format="gptq_v2"),
            QuantizationConfig(layout="gptq", weight_dtype="int4", group_size=32),
        ),
        (
            four_bits("gptq", format="gptq_v2"),
            QuantizationConfig(layout="gptq", weight_dtype="int4", group_size=32),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            QuantizationConfig(layout="scaled", weight_dtype="fp8", block=(128, 64)),
        ),
        ({"quant_method": "mxfp4"}, QuantizationConfig(layout="mxfp4", weight_dtype="mxfp4")),
        ({"quant_method": "fbgemm_fp8"}, QuantizationConfig(layout="scaled", weight_dtype="fp8")),
        (compressed(), QuantizationConfig(layout="scaled", weight_dtype="int8")),
        (
            compressed(strategy="group", group_size=64),
            QuantizationConfig(layout="scaled", weight_dtype="int8", block=(1, 64)),
        ),
        (
            compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
            QuantizationConfig(layout="scaled", weight_dtype="fp8", block=(128, 128)),
        ),
        (
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
            QuantizationConfig(layout="packed", weight_dtype="int4", group_size=128),
        ),
    ],
)
def test_supported_methods_are_parsed(raw: dict[str, Any], expected: QuantizationConfig) -> None:
    assert parse_quantization(file_of(raw)) == expected


def test_without_a_method_there_is_no_quantization() -> None:
    assert parse_quantization(file_of(None)) is None
    assert parse_quantization(file_of({})) is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quantization method bitsandbytes \(quantization_config.quant_method\) is not supported, known are awq",
        ),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with bits 3 is not supported"),
        (
            four_bits("gptq", 128, format="marlin"),
            "gptq with format 'marlin' is not",
        ),
        (four_bits("awq", 128, format="gemv"), "awq with version gemv is not"),
        (
            four_bits("awq", 128, zero_point=False),
            "awq with zero_point False is not",
        ),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8 with expert_dtype 'fp4' is not supported"),
        (compressed() | {"transform_config": {"config_groups": {"R3": {}}}}, "with transform_config is not supported"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config is not supported"),
        ({"quant_method": "gptq", "bits": 4}, "gptq with no group_size is not supported"),
        (
            four_bits("gptq", 128, dynamic={"-:a": {}}),
            "different settings per layer",
        ),
        (four_bits("awq", 0), "awq with group_size 0 is not"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not"),
        (compressed(num_bits=2), "compressed-tensors with type int of num_bits 2, strategy channel is not"),
        (compressed(strategy="token"), "compressed-tensors with strategy 'token' is not"),
        (compressed("marlin-24"), "compressed-tensors with format 'marlin-24' is not"),
        (compressed(symmetric=False), r"zero points \(symmetric false\) is not"),
        ({**compressed(), "config_groups": {}}, "0 groups of layers with different settings"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_quantization(file_of(raw))
    assert str(caught.value).startswith(f"{PATH}: ") and "\n" not in str(caught.value)
