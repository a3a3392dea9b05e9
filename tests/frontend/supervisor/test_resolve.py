"""resolve refuses a configuration that cannot start, in one line and before a process is started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER, GPU_NODES, check_parallel, find_checkpoint, resolve
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.config.engine_spec import EngineSpec
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.keys import Keys
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.ipc.models.quantization_config import QuantizationConfig
from tokenloom.ipc.process.machine_memory import gib, swap_bytes, total_bytes
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint


def resolved(folder: Path, **options: Any) -> EngineSpec:
    return resolve(EngineConfig(**{"device": "cpu", **options}), RunDirectory(folder))


def test_without_a_model_the_demo_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolved(tmp_path)
    assert Path(spec.model_folder) == DEMO_FOLDER == find_checkpoint("demo", None)
    assert spec.max_model_len == spec.model.max_position_embeddings >= 2048
    assert spec.endpoints.clients == f"ipc://{tmp_path}/client.sock"
    monkeypatch.setattr(os, "environ", spec.environment())
    assert type(spec).from_environment() == spec
    assert spec.fingerprint == type(spec).from_environment().fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not supported: it is no causal language model"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"dtype": "int8", "torch_dtype": "int8"}, "dtype int8"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"hqq .* is not supported, known are awq"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, model=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "has_state", "line"),
    [
        ({"kv_disk": "/nowhere"}, False, None),
        ({"enable_prefix_caching": False}, False, None),
        ({"kv_disk": "/nowhere", "enable_prefix_caching": False}, False, "no KV tiers: prefix caching is off, so that"),
        ({"kv_host_bytes": 1 << 20}, True, "no KV tiers: layers of JambaForCausalLM keep states, so that"),
    ],
)
def test_tiers_that_could_find_no_block_are_off_with_one_line(
    options: dict[str, Any], has_state: bool, line: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(recurrent_checkpoint(tmp_path, "jamba")) if has_state else None
    spec = resolved(tmp_path, model=model, **options)
    assert spec.uses_tiers == ("kv_disk" in options and line is None)
    assert [each for each in caplog.messages if "tiers" in each] == [
        f"{line} no block is found again" for line in [line] if line is not None
    ]


def test_a_max_model_len_above_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 1000000 is above .* lower it, or give a model: without"):
        resolved(tmp_path, max_model_len=1_000_000)


def test_a_model_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder, a GGUF file, a hub id"):
        find_checkpoint(str(tmp_path / "missing"), None)
    with pytest.raises(ConfigError, match="--tokenizer /nowhere is neither a folder"):
        resolved(tmp_path, tokenizer="/nowhere")
    with pytest.raises(ConfigError, match="does not exist"):
        resolved(tmp_path, model=str(tmp_path))


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    spec = resolved(tmp_path, quantization="int8")
    assert spec.model.quantization == QuantizationConfig(layout="on_load", weight_dtype="int8")
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"--quantization int8: .* quantized already \(fp8\): leave it out"):
        resolved(tmp_path, model=str(tmp_path), quantization="int8")


def test_a_head_that_is_started_again_tells_clients_that_it_serves_the_same(tmp_path: Path) -> None:
    place = {"listen_hosts": "tcp://127.0.0.1:7100", "hosts_key_file": str(tmp_path / "hosts.key")}
    Keys.generate().save(tmp_path / "hosts.key")
    specs = [
        resolve(
            EngineConfig(device="cpu", tensor_parallel_size=2, hosts=2, max_model_len=length, **place),  # type: ignore[arg-type]
            RunDirectory(tmp_path),
        )
        for length in (512, 512, 256)
    ]
    first, second, shorter = (spec.welcome for spec in specs)
    assert first.run_id != second.run_id
    assert first.model_digest == second.model_digest != shorter.model_digest
    assert all(welcome.model_digest for welcome in (first, second, shorter))


def test_heads_that_do_not_divide_among_the_ranks_are_refused() -> None:
    model = load_model_config(DEMO_FOLDER)
    for size in (1, 2, 4):
        check_parallel(model, size)
    with pytest.raises(ConfigError, match="do not divide among --tensor-parallel-size 7"):
        check_parallel(model, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "do not divide among --tensor-parallel-size 3"),
        ({"quantization": "int8"}, "--quantization int8: LlamaForCausalLM runs on transformers' layers"),
        ({"deterministic": True}, "--deterministic: LlamaForCausalLM runs on transformers' layers"),
    ],
)
def test_what_transformers_layers_lack_is_refused_by_option(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = EngineConfig(device="cpu", model_impl="transformers", **options)
    with pytest.raises(ConfigError, match=message):
        resolve(config, RunDirectory(tmp_path))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Make a folder with the demo's config.json and no weights."""
    (tmp_path / "config.json").write_bytes((DEMO_FOLDER / "config.json").read_bytes())
    return tmp_path


def write_weights(folder: Path, num_elements: int, size: int | None = None) -> Path:
    """Write a sparse safetensors file of one bfloat16 tensor; `size` in bytes truncates it."""
    tensor = {"dtype": "BF16", "shape": [num_elements], "data_offsets": [0, 2 * num_elements]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.embed_tokens.weight": tensor}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 2 * num_elements if size is None else size)
    return file


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, model=str(folder), **options)
    return str(caught.value)


def test_missing_or_truncated_weights_are_refused_before_a_process_is_started(checkpoint: Path) -> None:
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(checkpoint)
    file = write_weights(checkpoint, 1000, size=1500)
    assert f"{file} (1500 bytes) is truncated or damaged" in refusal(checkpoint)
    file.write_bytes(b"not safetensors")
    assert f"{file} (15 bytes) is truncated or damaged" in refusal(checkpoint)


def test_weights_larger_than_memory_are_refused_with_both_numbers(checkpoint: Path) -> None:
    num_elements = total_bytes() + swap_bytes()
    write_weights(checkpoint, num_elements)
    message = refusal(checkpoint, dtype="float32")
    assert f"take {gib(4 * num_elements)} as float32" in message and "of memory can be had here" in message
    write_weights(checkpoint, 1 << 20)
    assert resolved(checkpoint, model=str(checkpoint)).dtype == "bfloat16"


@pytest.mark.skipif(any(map(os.path.exists, GPU_NODES)), reason="there is a GPU")
def test_device_cuda_without_a_gpu_is_refused_before_a_process_is_started() -> None:
    with pytest.raises(ConfigError, match="--device cuda: there is no GPU here"):
        resolve(EngineConfig(device="cuda"), RunDirectory(Path("/nowhere")))
