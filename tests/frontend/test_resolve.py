"""What can be known to fail before a process is started fails then, in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tokenloom.frontend.resolve import DEMO_FOLDER, check_parallel, find_checkpoint, resolve
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.config import EngineConfig
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.model_config import ModelConfig
from tokenloom.ipc.quantization_config import QuantizationConfig


def test_without_a_model_the_demo_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve(EngineConfig(device="cpu"), RunDirectory(tmp_path))
    assert Path(spec.model_folder) == DEMO_FOLDER == find_checkpoint("demo", None)
    assert spec.max_model_len == spec.model.max_position_embeddings >= 2048
    assert spec.client_address == f"ipc://{tmp_path}/client.sock"
    monkeypatch.setattr(os, "environ", spec.environment())
    assert type(spec).from_environment() == spec
    assert spec.fingerprint == type(spec).from_environment().fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported, known are LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"dtype": "int8", "torch_dtype": "int8"}, "dtype int8"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization method hqq is not supported, known are awq"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model=str(tmp_path), device="cpu"), RunDirectory(tmp_path))


def test_a_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 1000000 is above .* lower it"):
        resolve(EngineConfig(max_model_len=1_000_000, device="cpu"), RunDirectory(tmp_path))


def test_a_name_that_is_no_folder_and_no_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder, nor a hub id"):
        find_checkpoint(str(tmp_path / "missing"), None)
    with pytest.raises(ConfigError, match="--tokenizer /nowhere is neither a folder"):
        resolve(EngineConfig(tokenizer="/nowhere", device="cpu"), RunDirectory(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(EngineConfig(model=str(tmp_path), device="cpu"), RunDirectory(tmp_path))


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    spec = resolve(EngineConfig(quantization="int8", device="cpu"), RunDirectory(tmp_path))
    assert spec.model.quantization == QuantizationConfig(layout="on_load", codes="int8")
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"--quantization int8 .* quantized already \(fp8\): leave it out"):
        resolve(EngineConfig(model=str(tmp_path), quantization="int8", device="cpu"), RunDirectory(tmp_path))


def test_heads_that_do_not_divide_are_refused() -> None:
    model = ModelConfig.load(DEMO_FOLDER)
    for size in (1, 2, 4):
        check_parallel(model, size)
    with pytest.raises(ConfigError, match="do not divide among --tensor-parallel-size 7"):
        check_parallel(model, 7)
