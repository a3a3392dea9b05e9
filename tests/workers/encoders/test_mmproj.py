"""The encoder in an mmproj file, and the language model beside it, are those of the checkpoint that they were made of.

The checkpoint's own embeddings are those of transformers (`test_encoder.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom.frontend.checkpoint.gguf.folder import checkpoint_folder
from tokenloom.frontend.checkpoint.gguf.mmproj.projectors import ALL
from tokenloom.ipc.blobs.media_file import MediaFile
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.weight_files import stored_tensors
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.ipc.spec.processors.audio_processor_config import load_audio_processor
from tokenloom.ipc.spec.processors.image_processor_config import load_image_processor
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.mmproj_checkpoints import MMPROJ_MODELS, MediaFiles, write_files
from tokenloom.tests.support.mmproj_conversions import convert_media, convert_mmproj
from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_checkpoints import write_vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.workers.encoders.audio import audio_items
from tokenloom.tests.workers.encoders.images import image_items
from tokenloom.tests.workers.encoders.media_case import COUNTS, CPU, SIZES, encode
from tokenloom.workers.encoders.encoder import Encoder

WIDE = (1, 9, 8)  # of more than one window of Qwen2.5-VL's published size
UNLIKE = ("architecture", "quantization", "dtype", "eos_token_ids", "vision", "audio")  # not of the checkpoint's shape


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path / "cache")))


def folder_of(files: MediaFiles) -> Path:
    return checkpoint_folder(files.model, None, files.mmproj)


def load(folder: Path) -> Encoder:
    config = load_model_config(folder).encoder
    assert config is not None
    return Encoder.load(folder, config, torch.float32, CPU)


def items_of(folder: Path, name: str) -> list[MediaFile]:
    encoder: Any = load_model_config(folder).encoder
    if isinstance(encoder, VisionConfig):
        return [image_items.random_item(encoder, seed, *size) for seed, size in enumerate((*SIZES, WIDE))]
    return [audio_items.random_item(encoder, count, count) for count in COUNTS[name][:4]]


def rounded(model: ModelConfig) -> Any:
    """Return a model's config with floats as a GGUF file stores them."""
    kept = {field: each for field, each in msgspec.structs.asdict(model).items() if field not in UNLIKE}
    return json.loads(msgspec.json.encode(kept), parse_float=lambda text: f"{float(text):.6g}")


@pytest.mark.parametrize("name", some(list(MMPROJ_MODELS), 6))
def test_embeddings_and_language_model_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, name)
    made = folder_of(files)
    theirs, ours = load(files.checkpoint), load(made)
    for item in items_of(files.checkpoint, name):
        assert torch.equal(encode(ours, item), encode(theirs, item))
    expected, found = load_model_config(files.checkpoint), load_model_config(made)
    assert rounded(found) == rounded(expected)
    assert found.encoder is not None and expected.encoder is not None
    assert found.encoder.family == expected.encoder.family
    assert found.encoder.placeholder_id == expected.encoder.placeholder_id


@pytest.mark.parametrize("name", some(list(MMPROJ_MODELS), 6))
def test_media_are_prepared_as_for_the_checkpoint(name: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, name)
    expected, found = load_model_config(files.checkpoint), load_model_config(folder_of(files))
    if expected.vision is not None and found.vision is not None:
        theirs = load_image_processor(files.checkpoint, expected.vision)
        assert load_image_processor(folder_of(files), found.vision) == theirs
    else:
        assert expected.audio is not None and found.audio is not None
        assert found.audio == expected.audio
        clips = load_audio_processor(files.checkpoint, expected.audio, 60.0)
        assert load_audio_processor(folder_of(files), found.audio, 60.0) == clips


def test_windows_have_the_published_size_if_the_file_names_none(tmp_path: Path) -> None:
    files = write_files(tmp_path, "qwen2_5_vl")
    config = files.checkpoint / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"window_size": 32', '"window_size": 112'))
    convert_mmproj(files.checkpoint, files.mmproj)
    theirs, ours = load(files.checkpoint), load(folder_of(files))
    for item in items_of(files.checkpoint, "qwen2_5_vl"):
        assert torch.equal(encode(ours, item), encode(theirs, item))


def test_a_projector_takes_several_layers_side_by_side(tmp_path: Path) -> None:
    model = VISION_MODELS["llava"]
    model = replace(model, config={**model.config, "vision_feature_layer": [2, 1]})
    checkpoint = write_vision_checkpoint(tmp_path / "checkpoint", model)
    files = MediaFiles(checkpoint, tmp_path / "model.gguf", tmp_path / "mmproj.gguf")
    convert_media(*files)
    theirs, ours = load(checkpoint), load(folder_of(files))
    for item in items_of(checkpoint, "llava"):
        assert torch.equal(encode(ours, item), encode(theirs, item))


@pytest.mark.parametrize("form", ["Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("name", some(["gemma3", "internvl", "qwen2_5_vl", "qwen3_vl", "mistral3", "voxtral"], 1))
def test_encoders_in_fewer_bits_have_the_elements_that_gguf_reads(name: str, form: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, name, form)
    assert {form, "F32"} <= {tensor.dtype for tensor in stored_tensors(folder_of(files)).values()}
    floats = tmp_path / "mmproj-floats.gguf"
    convert_mmproj(files.checkpoint, floats, form, as_floats=True)
    item = items_of(files.checkpoint, name)[0]
    expected = encode(load(checkpoint_folder(files.model, None, floats)), item)
    assert torch.equal(encode(load(folder_of(files)), item), expected)
    assert not torch.equal(expected, encode(load(files.checkpoint), item))


def test_all_projectors_are_written_by_a_test() -> None:
    written = (VISION_MODELS[name] if name in VISION_MODELS else AUDIO_MODELS[name] for name in MMPROJ_MODELS)
    assert {each.architecture for each in ALL} <= {each.config["architectures"][0] for each in written}


def test_a_tensor_of_another_shape_is_refused_with_its_file(tmp_path: Path) -> None:
    files = write_files(tmp_path, "gemma3")
    tensors = load_file(files.checkpoint / "model.safetensors")
    name = "vision_tower.vision_model.post_layernorm.weight"
    tensors[name] = torch.ones(len(tensors[name]) + 32)
    save_file(tensors, files.checkpoint / "model.safetensors")
    convert_mmproj(files.checkpoint, files.mmproj)
    with pytest.raises(
        ConfigError, match=r"mmproj-F32.gguf: tensor vision_tower.post_layernorm.weight has shape \[80\]"
    ):
        load(folder_of(files))
