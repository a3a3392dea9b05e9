"""resolve refuses a configuration that cannot start, in one line and before a process is started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.checkpoint import memory_check
from tokenloom.frontend.checkpoint.resolve import (
    DEMO_FOLDER,
    GPU_NODES,
    find_checkpoint,
    resolve,
)
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.process.machine_memory import gib, swap_bytes, total_bytes
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.gguf_conversions import convert as convert_family
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.text_encoders import CONFIGS
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint


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
        ({"architectures": ["ViTModel"]}, "ViTModel is not supported: it is neither a causal language model nor"),
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


def test_an_error_about_a_gguf_file_names_the_file_and_not_the_folder_that_was_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    convert(tiny_checkpoint(tmp_path / "m", "llama"), tmp_path / "mine.gguf", "F32")
    folder = find_checkpoint("mine.gguf", None)
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path / "run", model="mine.gguf")
    assert str(caught.value).startswith("mine.gguf: generation_config.json: temperature must be in ")
    assert "cache" not in str(caught.value)
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1000)
    monkeypatch.setattr(memory_check, "swap_bytes", lambda: 0)
    with pytest.raises(ConfigError, match=r"^mine\.gguf needs .* of memory .* can be had here"):
        resolved(tmp_path / "run", model="mine.gguf", generation_config="vllm")


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


@pytest.mark.parametrize("num_further", [0, 1])
def test_skipped_layers_of_a_gguf_file_have_one_line(
    num_further: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = tiny_checkpoint(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=num_further)
    convert_family(checkpoint, tmp_path / "model.gguf")
    caplog.set_level("INFO")
    resolved(tmp_path, model=str(tmp_path / "model.gguf"), tokenizer="demo")
    line = "layers in the file that predict further tokens (MTP) are skipped: 1"
    assert [each for each in caplog.messages if "skipped" in each] == [line] * num_further


def test_a_model_that_is_neither_folder_nor_hub_id_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder, a GGUF file, a hub id"):
        find_checkpoint(str(tmp_path / "missing"), None)
    for options, message in (
        ({"tokenizer": "/nowhere"}, "--tokenizer /nowhere is neither a folder"),
        ({"model": str(tmp_path)}, "does not exist"),
        ({"max_model_len": 10**6}, r"--max-model-len 1000000 is above .* lower it, or give a model: without"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(tmp_path, **options)


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
    first, second, shorter = (
        resolved(tmp_path, tensor_parallel_size=2, hosts=2, max_model_len=length, **place).welcome
        for length in (512, 512, 256)
    )
    assert first.run_id != second.run_id
    assert "" != first.model_digest == second.model_digest != shorter.model_digest != ""


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "do not divide among --tensor-parallel-size 3"),
        ({"quantization": "int8"}, "--quantization int8: LlamaForCausalLM runs on transformers' layers"),
        ({"deterministic": True}, "--deterministic: LlamaForCausalLM runs on transformers' layers"),
    ],
)
def test_what_layers_lack_is_refused_by_option(
    implementation: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if implementation == "auto" and "divide" not in message:
        resolved(tmp_path, **options)
        return
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, model_impl=implementation, **options)


def write_weights(folder: Path, num_elements: int, size: int | None = None) -> Path:
    """Write a sparse safetensors file of one bfloat16 tensor; `size` in bytes truncates it."""
    tensor = {"dtype": "BF16", "shape": [num_elements], "data_offsets": [0, 2 * num_elements]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.embed_tokens.weight": tensor}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 2 * num_elements if size is None else size)
    return file


def refusal(folder: Path, **options: object) -> str:
    """Return why a folder with the demo's configuration is refused."""
    (folder / "config.json").write_bytes((DEMO_FOLDER / "config.json").read_bytes())
    with pytest.raises(ConfigError) as caught:
        resolved(folder, model=str(folder), **options)
    return str(caught.value)


def test_missing_or_truncated_weights_are_refused_before_a_process_is_started(tmp_path: Path) -> None:
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)
    file = write_weights(tmp_path, 1000, size=1500)
    assert f"{file} (1500 bytes) is truncated or damaged" in refusal(tmp_path)
    file.write_bytes(b"not safetensors")
    assert f"{file} (15 bytes) is truncated or damaged" in refusal(tmp_path)


def test_weights_larger_than_memory_are_refused_with_both_numbers(tmp_path: Path) -> None:
    num_elements = total_bytes() + swap_bytes()
    write_weights(tmp_path, num_elements)
    message = refusal(tmp_path, dtype="float32")
    assert f"weights {gib(4 * num_elements)} as float32, KV cache" in message and "can be had here" in message
    write_weights(tmp_path, 1 << 20)
    assert resolved(tmp_path, model=str(tmp_path)).dtype == "bfloat16"


@pytest.mark.skipif(any(map(os.path.exists, GPU_NODES)), reason="there is a GPU")
def test_device_cuda_without_a_gpu_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda: there is no GPU here"):
        resolved(tmp_path, device="cuda")


# ── the encoder cache ────────────────────────────────────────────────────────────────────────────────────────────────


def spec_of(folder: Path, **options: Any) -> EngineSpec:
    return resolved(folder, model=str(folder), **options)


def test_the_cache_holds_two_of_the_largest_images_or_those_of_a_step(tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path, "gemma3")
    spec = spec_of(folder, max_num_seqs=4, max_num_batched_tokens=4)
    largest = spec.max_item_embeds
    assert 4 < largest <= spec.max_model_len
    assert spec.max_num_batched_tokens == largest + 4, "an image of Gemma 3 is computed in one step"
    assert spec.encoder_cache_tokens == 2 * largest
    assert spec_of(folder, max_num_batched_tokens=4096).encoder_cache_tokens == 4096
    assert spec_of(folder, encoder_cache_tokens=largest).encoder_cache_tokens == largest
    with pytest.raises(ConfigError, match=f"{largest - 1} is below the {largest} embeddings of the largest image"):
        spec_of(folder, encoder_cache_tokens=largest - 1)
    text = spec_of(folder, language_model_only=True, max_num_seqs=4, max_num_batched_tokens=4)
    assert (text.encoder_cache_tokens, text.max_num_batched_tokens) == (0, 4)


def test_an_image_longer_than_any_prompt_takes_no_memory(tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path, "qwen2_5_vl")
    whole, short = spec_of(folder, max_num_batched_tokens=256), spec_of(folder, max_model_len=16)
    assert short.max_item_embeds == 16 < whole.max_item_embeds
    assert whole.max_num_batched_tokens == 256, "its images span steps"


VOXTRAL = """{
  "architectures": ["VoxtralForConditionalGeneration"], "audio_token_id": 24, "dtype": "float32",
  "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 128, "num_mel_bins": 20},
  "text_config": {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 4096
  }
}"""


def voxtral(folder: Path, **extractor: object) -> Path:
    """Write the files beside the weights of a model that hears audio."""
    (folder / "config.json").write_text(VOXTRAL)
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 20, **extractor}))
    return folder


def test_the_cache_holds_two_of_the_longest_clips(tmp_path: Path) -> None:
    folder = voxtral(tmp_path)
    options = {"load_format": "dummy", "max_num_batched_tokens": 256}
    spec = spec_of(folder, max_audio_s=60.0, **options)
    assert (spec.max_item_embeds, spec.encoder_cache_tokens) == (3 * 375, 6 * 375), "60 s may round up to a sample more"
    assert spec_of(folder, max_audio_s=59.0, **options).max_item_embeds == 2 * 375
    assert spec_of(folder, **options).max_item_embeds == 4096, "no clip is longer than a prompt"
    with pytest.raises(
        ConfigError, match="749 is below the 750 embeddings of the longest audio clip: raise it, or lower"
    ):
        spec_of(folder, max_audio_s=59.0, encoder_cache_tokens=749, **options)


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_without_its_packages_a_model_that_hears_audio_is_not_started(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"hears audio, .*: pip install 'tokenloom\[audio\]'"):
        spec_of(voxtral(tmp_path), load_format="dummy")
    assert spec_of(voxtral(tmp_path), load_format="dummy", language_model_only=True).model.audio is None


@pytest.mark.parametrize("off", [{"language_model_only": True}, {"limit_mm_per_prompt": {"audio": 0}}])
def test_a_model_without_its_ears_has_no_cache(tmp_path: Path, off: dict[str, object]) -> None:
    spec = spec_of(voxtral(tmp_path), load_format="dummy", **off)
    assert spec.model.audio is None and spec.encoder_cache_tokens == spec.max_item_embeds == 0
    both = spec_of(tmp_path, load_format="dummy", limit_mm_per_prompt={"image": 0})
    assert both.model.audio is not None
    with pytest.raises(ConfigError, match="has sampling_rate 8000, only 16000 is served"):
        spec_of(voxtral(tmp_path, sampling_rate=8000), load_format="dummy")


# ── Whisper ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_checkpoint(tmp_path_factory.mktemp("whisper"))  # 37 rows of audio, 32 tokens of text


@pytest.mark.parametrize(("block_size", "num_tokens"), [(16, 48), (1, 37), (64, 64)])
def test_a_clip_takes_whole_blocks_in_front_of_the_models_tokens(
    block_size: int, num_tokens: int, folder: Path
) -> None:
    spec = spec_of(folder, block_size=block_size)
    assert spec.model.num_clip_tokens == num_tokens
    assert (spec.max_model_len, spec.max_text_len) == (num_tokens + 32, 32)
    assert spec_of(folder, block_size=block_size, max_model_len=20).max_model_len == num_tokens + 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 33}, "--max-model-len 33 is above the model's max_position_embeddings 32"),
        ({"enable_lora": True}, "cross attention, which takes no adapters"),
        ({"model_impl": "transformers"}, "is an encoder-decoder, which transformers' layers cannot run"),
    ],
)
def test_options_that_whisper_has_no_place_for_are_refused_and_rules_of_answers_may_be_off(
    options: dict[str, Any], message: str, folder: Path
) -> None:
    has_rules = [spec_of(folder, generation_config=each).model.output_rules is not None for each in ("auto", "vllm")]
    assert has_rules == [True, False]
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, **options)


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "int8"}, {"num_kv_blocks": 100}, {"kv_cache_memory_bytes": 1 << 30}], ids=str
)
def test_an_encoder_refuses_options_of_a_kv_cache(options: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["bert"]), encoding="utf-8")
    assert resolved(tmp_path, model=str(folder), load_format="dummy").model.is_encoder
    option = f"--{next(iter(options)).replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option} is given, but BertModel is an encoder"):
        resolved(tmp_path, model=str(folder), load_format="dummy", **options)
