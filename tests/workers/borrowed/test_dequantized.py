"""A quantized checkpoint on transformers' layers gives the logits of the floats that it encodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.quantized_checkpoints import FORMATS, mxfp4_pair, quantized_pair
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.borrowed.test_model import load
from tokenloom.tests.workers.models.test_decoder import prompts_of
from tokenloom.tests.workers.paged_run import PagedRun


@pytest.mark.parametrize("form", some(list(FORMATS), 2))
def test_logits_are_those_of_the_floats(form: str, tmp_path: Path) -> None:
    tokens = prompts_of({"a": 9, "b": 5}, 250, seed=1)
    quantized, plain = (PagedRun(load(folder), 4).step(tokens) for folder in quantized_pair(tmp_path, form))
    for name in tokens:
        torch.testing.assert_close(quantized[name], plain[name], atol=1e-4, rtol=0)


def test_layouts_of_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="serve no mxfp4: take the checkpoint with floats"):
        load_model_config(mxfp4_pair(tmp_path, intermediate_size=96)[0], implementation="transformers")


def test_codes_of_several_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    folder, _ = quantized_pair(tmp_path, "fp8, channels")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.experts.weight"] = torch.zeros(2, 4, 4).to(torch.float8_e4m3fn)
    save_file(weights, file)
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="holds quantized matrices of several experts"):
        load(folder)
