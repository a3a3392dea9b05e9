"""Quantized weights are multiplied as integers wherever that is possible, unless the option says otherwise."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.ipc.processor import has_avx2
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import has_integer_products, integer_obstacle, with_floats
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig
from tokenloom.tests.support.engine_specs import new_spec

needs_avx2 = pytest.mark.skipif(not has_avx2(), reason="the processor has no AVX2")


def model_of(layout: str | None, weight_dtype: str = "int4") -> ModelConfig:
    quantization = None
    if layout is not None:
        quantization = msgspec.convert({"layout": layout, "weight_dtype": weight_dtype}, QuantizationConfig)
    return msgspec.structs.replace(new_spec().model, quantization=quantization)


@needs_avx2
@pytest.mark.parametrize("layout", ["gguf", "awq", "gptq", "packed", "mxfp4", "on_load"])
def test_codes_are_multiplied_as_integers_by_default(layout: str) -> None:
    assert has_integer_products(EngineConfig(), model_of(layout), "bfloat16", "cpu")


@needs_avx2
@pytest.mark.parametrize("layout", ["scaled", "on_load"])
def test_fp8_weights_are_rounded_for_them(layout: str) -> None:
    assert has_integer_products(EngineConfig(), model_of(layout, "fp8"), "bfloat16", "cpu")


@pytest.mark.parametrize(
    ("model", "options", "dtype", "device"),
    [
        (model_of(None), {}, "bfloat16", "cpu"),
        (model_of("gguf"), {}, "float32", "cpu"),
        (model_of("gguf"), {"enforce_reference": True}, "bfloat16", "cpu"),
        (model_of("gguf"), {"quantized_products": "floats"}, "bfloat16", "cpu"),
        (model_of("gguf"), {}, "bfloat16", "cuda"),
    ],
)
def test_floats_are_multiplied_where_integers_cannot_be_or_are_not_wanted(
    model: ModelConfig, options: dict[str, object], dtype: str, device: str
) -> None:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    assert not has_integer_products(config, model, dtype, device)


@needs_avx2
def test_borrowed_layers_have_no_products_of_integers() -> None:
    model = msgspec.structs.replace(model_of("awq"), implementation="transformers")
    assert integer_obstacle(EngineConfig(), model, "bfloat16") == "transformers' layers: leave it out"


def test_only_the_codes_of_a_gguf_file_become_floats_while_they_are_read() -> None:
    assert with_floats(model_of("gguf")).quantization is None
    assert with_floats(model_of("awq")) == model_of("awq")
    assert with_floats(model_of(None)) == model_of(None)
