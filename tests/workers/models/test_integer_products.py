"""Models whose int8 and int4 weights are multiplied as integers: near the same model with floats, in less memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tokenloom.frontend.checkpoint.gguf.folder import checkpoint_folder
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import has_integer_products, served_model
from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.inputs.make_checkpoint import config_of
from tokenloom.scripts.bench.inputs.random_gguf import MIXTURES, write_random
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.media_checkpoints import DEMO
from tokenloom.tests.support.quantized_checkpoints import FORMATS, mxfp4_pair, quantized_pair
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.device.device_check import check_cpu
from tokenloom.workers.models.decoder import DecoderModel

BF16 = torch.bfloat16
COUNTRIES = ("France", "Norway", "Japan", "Peru", "Kenya", "Canada", "Egypt", "India")
needs_products = pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")


def load_demo(quantization: str | None) -> DecoderModel:
    ops = select_ops(CPU, BF16, has_integer_products=quantization is not None)
    return load(DEMO, BF16, quantization=quantization, ops=ops)


def logits_of(model: DecoderModel, texts: dict[str, list[int]]) -> Tensor:
    run = PagedRun(model, 16, dtype=BF16)
    return torch.cat(list(run.step(texts).values()))


@needs_products
@pytest.mark.parametrize(("quantization", "agreement", "divergence"), [("int8", 0.98, 0.002), ("int4", 0.9, 0.05)])
def test_the_demo_says_nearly_the_same(quantization: str, agreement: float, divergence: float) -> None:
    """Over all tokens of some texts: the share of equal best tokens, and the mean Kullback-Leibler divergence in nats.
    The bounds are those that the field's own figures for such weights leave."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    said = (f"The capital of {country} is a city. What is the capital of {country}?" for country in COUNTRIES)
    texts = {text: tokenizer.encode(text).ids for text in said}
    floats, quantized = load_demo(None), load_demo(quantization)
    exact, found = logits_of(floats, texts).log_softmax(1), logits_of(quantized, texts).log_softmax(1)
    assert float((exact.argmax(1) == found.argmax(1)).float().mean()) >= agreement
    assert 0 < float((exact.exp() * (exact - found)).sum(1).mean()) <= divergence
    assert quantized.weight_bytes < {"int8": 0.62, "int4": 0.5}[quantization] * floats.weight_bytes


@needs_products
def test_experts_in_mxfp4_stay_codes(tmp_path: Path) -> None:
    quantized, plain = mxfp4_pair(tmp_path, intermediate_size=96)
    codes, floats = (
        load(folder, BF16, ops=select_ops(CPU, BF16, has_integer_products=folder == quantized))
        for folder in (quantized, plain)
    )
    assert codes.weight_bytes < 0.7 * floats.weight_bytes
    texts = {"a": [5, 9, 200, 31, 7] * 6}
    exact, found = logits_of(floats, texts).float(), logits_of(codes, texts).float()
    error = float((found - exact).std() / exact.std())
    assert 1e-4 < error < 0.05


@needs_products
@pytest.mark.parametrize(("form", "bits"), [("Q4_K_M", 5.32), ("Q5_K_M", 6.1)])
def test_a_file_of_mixed_formats_keeps_their_bits(
    form: str, bits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys in another format than values, and a head of its own: beside the same file as floats."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_random(tmp_path / "model.gguf", config_of("qwen3", 256, 4, 4, 2, 512, 700, head_dim=64), MIXTURES[form])
    folder = checkpoint_folder(tmp_path / "model.gguf")
    codes = load(folder, BF16, ops=select_ops(CPU, BF16, has_integer_products=True))
    floats = load(folder, BF16, ops=select_ops(CPU, BF16, cpu_isa="avx2"))  # with AMX they would be codes, too
    texts = {"a": [5, 9, 200, 31, 7] * 6, "b": [650]}
    exact, found = logits_of(floats, texts).float(), logits_of(codes, texts).float()
    assert 1e-4 < float((found - exact).std() / exact.std()) < 0.05
    assert codes.weight_bytes / floats.weight_bytes < bits / 16


@pytest.mark.parametrize(
    ("weights", "options", "dtype", "words"),
    [
        (None, {}, "bfloat16", "no quantized weights: give --quantization int8 or int4"),
        ("int8", {}, "float32", "activations of float32: give --dtype bfloat16"),
        ("int4", {"enforce_reference": True}, "bfloat16", "plain torch: leave out --enforce-reference"),
    ],
)
@pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")
def test_what_has_no_such_products_is_named(
    weights: str | None, options: dict[str, object], dtype: str, words: str
) -> None:
    config = EngineConfig(quantized_products="integers", **options)  # type: ignore[arg-type]
    spec = new_spec(config=config, dtype=dtype, has_integer_products=True)
    if weights is not None:
        quantization = msgspec.convert({"layout": "scaled", "weight_dtype": weights}, QuantizationConfig)
        model = msgspec.structs.replace(spec.model, quantization=quantization)
        spec = msgspec.structs.replace(spec, model=model)
    with pytest.raises(ConfigError, match=f"^--quantized-products integers .*{words}$"):
        check_cpu(spec)


@needs_products
def test_all_quantized_checkpoints_take_integers_by_default(tmp_path: Path) -> None:
    for form in (each for each in FORMATS if not each.startswith("mxfp4")):
        quantized, plain = quantized_pair(tmp_path / form.replace(" ", ""), form, "llama", dtype="bfloat16")
        takes = [
            has_integer_products(EngineConfig(), served_model(EngineConfig(), folder), "bfloat16", "cpu")
            for folder in (quantized, plain)
        ]
        assert takes == [True, False], form
    quantized, _ = mxfp4_pair(tmp_path / "mxfp4", intermediate_size=96)
    assert has_integer_products(EngineConfig(), served_model(EngineConfig(), quantized), "bfloat16", "cpu")
    config = EngineConfig(quantization="fp8")
    assert has_integer_products(config, served_model(config, DEMO), "bfloat16", "cpu")
