"""Mixers with a state in half precision, and with quantized matrices, are near those with floats."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom.ipc.spec.config.served_model import quantized_on_load
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig
from tokenloom.kernels.select import select_ops
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import oracle, run_schedule
from tokenloom.tests.workers.models.test_hybrids import MAX_MODEL_LEN, SHORT, Case, in_chunks
from tokenloom.tests.workers.models.test_integer_products import needs_products
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model

BF16 = torch.bfloat16
LONG = {"a": 90, "b": 40}
MATRICES = "in_proj_qkvz.weight"


def load(folder: Path, config: ModelConfig, cpu_isa: str = "auto") -> DecoderModel:
    ops = select_ops(CPU, BF16, cpu_isa=cpu_isa, has_integer_products=config.quantization is not None)
    return load_model(folder, config, MAX_MODEL_LEN, BF16, CPU, ops, ParallelGroup())


@pytest.mark.parametrize("family", some(["qwen3_5", "lfm2", "bamba", "falcon_h1_scaled", "nemotron_h"], 2))
def test_half_precision_is_as_close_to_float32_as_transformers(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family, LONG)
    rounded = oracle(case.folder, case.tokens, BF16)
    run = PagedRun(load(case.folder, case.config), 16, dtype=BF16)
    actual = run_schedule(run, case.tokens, in_chunks(LONG, 30))
    for name, exact in case.expected.items():
        ours = (actual[name] - exact).abs().mean(dim=1).median()
        theirs = (rounded[name] - exact).abs().mean(dim=1).median()
        assert ours <= 1.1 * theirs


@needs_products
@pytest.mark.parametrize("family", some(["qwen3_5", "lfm2", "granite4_dense"], 2))
@pytest.mark.parametrize(("quantization", "bound", "share"), [("int8", 0.08, 0.75), ("int4", 0.3, 0.6)])
def test_matrices_of_mixers_are_quantized_on_load(
    quantization: str, bound: float, share: float, family: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, family, SHORT, vocab_size=8)
    floats = load(case.folder, case.config)
    quantized = load(case.folder, quantized_on_load(case.config, quantization))
    exact, found = (
        run_schedule(PagedRun(each, 8, dtype=BF16), case.tokens, [SHORT])["a"] for each in (floats, quantized)
    )
    assert 1e-4 < float((found - exact).std() / exact.std()) < bound
    assert quantized.weight_bytes < share * floats.weight_bytes


@needs_products
def test_floats_of_decays_do_not_widen_the_matrices_beside_them(tmp_path: Path) -> None:
    """Published quantized files leave the small projections of decay and beta as floats."""
    folder = recurrent_checkpoint(tmp_path, "qwen3_next")
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith(MATRICES)]:
        scales = tensors[name].abs().amax(dim=1, keepdim=True) / 127
        codes = (tensors[name] / scales).round().to(torch.int8)
        tensors |= {name: codes, name.replace(".weight", ".weight_scale"): scales}
    save_file(tensors, folder / "model.safetensors")
    config = load_model_config(folder)
    stored = msgspec.convert({"layout": "scaled", "weight_dtype": "int8"}, QuantizationConfig)
    quantized = load(folder, msgspec.structs.replace(config, quantization=stored))
    plain = load(recurrent_checkpoint(tmp_path / "plain", "qwen3_next"), config)
    num_matrices, size = 3, 64 * (2 * 32 + 2 * 64)
    assert plain.weight_bytes - quantized.weight_bytes > 0.8 * num_matrices * size
