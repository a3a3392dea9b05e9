"""Configurations of models that take images or audio are read as transformers reads them, with its defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config

SEEING: dict[str, Any] = {
    "Llava": transformers.LlavaConfig,
    "Mistral3": transformers.Mistral3Config,
    "Idefics3": transformers.Idefics3Config,
    "SmolVLM": transformers.SmolVLMConfig,
    "InternVL": transformers.InternVLConfig,
    "Qwen2VL": transformers.Qwen2VLConfig,
    "Qwen2_5_VL": transformers.Qwen2_5_VLConfig,
    "Qwen3VL": transformers.Qwen3VLConfig,
    "Gemma3": transformers.Gemma3Config,
}
HEARING: dict[str, Any] = {
    "Qwen2Audio": transformers.Qwen2AudioConfig,
    "Voxtral": transformers.VoxtralConfig,
    "Qwen3ASR": transformers.Qwen3ASRConfig,
}
CONFIGS = SEEING | HEARING
TEXT = {"num_hidden_layers": 3, "intermediate_size": 512}
FILES: dict[str, dict[str, Any]] = {
    "nothing but defaults": {},
    "empty objects": {"text_config": {}, "vision_config": {}},
    "some fields": {
        "text_config": {**TEXT, "tie_word_embeddings": True},
        "vision_config": {"patch_size": 8},
        "tie_word_embeddings": False,
    },
}
VOXTRAL_TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256, "num_mel_bins": 80}
WHISPER_TOWER = {"d_model": 64, "encoder_layers": 2, "encoder_ffn_dim": 256, "num_mel_bins": 80}
AUDIO_FILES: dict[str, dict[str, Any]] = {
    "nothing but defaults": {},
    "empty objects": {"text_config": {}, "audio_config": {}},
    "some fields": {"text_config": TEXT, "audio_config": WHISPER_TOWER},
    "no ties": {"text_config": TEXT, "tie_word_embeddings": False},
    "rope": {"text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}},
}


def read(folder: Path, name: str, fields: dict[str, Any], **options: Any) -> ModelConfig:
    raw = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": CONFIGS[name].model_type, **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(folder, **options)


def check_text(ours: ModelConfig, text: Any) -> None:
    """Compare the shape of the language model."""
    sizes = (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers)
    assert sizes == (text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (ours.num_heads, ours.num_kv_heads, ours.head_dim)
    assert heads == (text.num_attention_heads, text.num_key_value_heads, head_dim)
    assert ours.max_position_embeddings == text.max_position_embeddings
    assert ours.norm.eps == text.rms_norm_eps
    rope = text.rope_parameters.get("full_attention", text.rope_parameters)
    assert ours.ropes[0].theta == rope["rope_theta"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_has_the_shape_of_transformers(name: str, file: str, tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, name, FILES[file]), CONFIGS[name](**FILES[file])
    text = theirs.text_config
    check_text(ours, text)
    assert ours.tie_word_embeddings == bool(theirs.tie_word_embeddings)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    assert [layer.window for layer in ours.layers] == [window if kind[0] == "s" else None for kind in kinds]

    vision, tower = ours.vision, theirs.vision_config
    assert vision is not None and vision.image_token_id == theirs.image_token_id
    assert vision.hidden_size == (tower.embed_dim if name == "Qwen2VL" else tower.hidden_size)
    assert vision.num_layers == tower.num_hidden_layers
    assert vision.patch_size == (tower.patch_size[0] if name == "InternVL" else tower.patch_size)
    assert vision.num_deepstack == len(getattr(tower, "deepstack_visual_indexes", ()))
    assert vision.is_bidirectional == (name == "Gemma3")


@pytest.mark.parametrize("file", AUDIO_FILES)
@pytest.mark.parametrize("name", HEARING)
def test_a_model_that_hears_has_the_shape_of_transformers(name: str, file: str, tmp_path: Path) -> None:
    fields = AUDIO_FILES[file]
    if name == "Voxtral":
        fields = {**fields, "audio_token_id": 7}
        fields |= {"audio_config": VOXTRAL_TOWER} if fields.get("audio_config") else {}
    ours, theirs = read(tmp_path, name, fields), CONFIGS[name](**fields)
    check_text(ours, theirs.text_config)
    is_tied = name == "Qwen3ASR" and theirs.tie_word_embeddings  # the classes of the others tie nothing
    assert ours.tie_word_embeddings == is_tied
    assert all(layer.window is None for layer in ours.layers) and ours.vision is None

    eos = transformers.GenerationConfig.from_model_config(theirs).eos_token_id  # without a generation_config.json
    assert ours.eos_token_ids == ([] if eos is None else sorted(eos if isinstance(eos, list) else [eos]))
    audio, tower = ours.audio, theirs.audio_config
    assert audio is not None and audio.audio_token_id == theirs.audio_token_id
    sizes = (audio.hidden_size, audio.num_layers, audio.num_mel_bins)
    assert sizes == (tower.hidden_size, tower.num_hidden_layers, tower.num_mel_bins)
    if name == "Qwen3ASR":
        assert (audio.window_frames, audio.window_rows) == (2 * tower.n_window, tower.max_position_embeddings)
        assert audio.windows_together * audio.window_frames == tower.n_window_infer
    else:
        assert audio.window_frames == 2 * audio.window_rows == 2 * tower.max_source_positions
        assert audio.rows_per_embed == (2 if name == "Qwen2Audio" else tower.intermediate_size // tower.hidden_size)
    assert len(audio.stages) == audio.num_layers + 3


def test_an_encoder_of_pixtral_makes_llava_a_pixtral(tmp_path: Path) -> None:
    fields = {"vision_config": {"model_type": "pixtral"}, "text_config": {"model_type": "mistral"}}
    config = read(tmp_path, "Llava", fields)
    assert config.vision is not None
    assert (config.vision.family, config.vision.image_size, config.vision.merge_size) == ("pixtral", 0, 1)
    assert config.num_kv_heads == 8


@pytest.mark.parametrize(
    ("name", "fields", "merge_size"),
    [
        ("Idefics3", {"scale_factor": 4}, 4),
        ("InternVL", {"downsample_ratio": 0.25}, 4),
        ("Qwen2VL", {"vision_config": {"spatial_merge_size": 3}}, 3),
        ("Gemma3", {"vision_config": {"image_size": 896, "patch_size": 14}}, 4),
        ("Mistral3", {"spatial_merge_size": 1}, 1),
    ],
)
def test_patches_on_each_side_of_an_embedding(
    name: str, fields: dict[str, Any], merge_size: int, tmp_path: Path
) -> None:
    vision = read(tmp_path, name, fields).vision
    assert vision is not None and vision.merge_size == merge_size


def test_old_files_of_qwen_have_all_fields_on_one_level(tmp_path: Path) -> None:
    flat = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    scaling = {"type": "mrope", "mrope_section": [4, 6, 6]}
    config = read(tmp_path, "Qwen2_5_VL", {**flat, "rope_scaling": scaling, "rope_theta": 5000.0})
    assert (config.hidden_size, config.num_layers, config.head_dim) == (256, 2, 32)
    rope = config.ropes[0]
    assert (rope.kind, rope.theta, rope.sections, rope.is_interleaved) == ("default", 5000.0, [4, 6, 6], False)


def test_qwen3_interleaves_the_sections(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5e6}
    rope = read(tmp_path, "Qwen3VL", {"text_config": {"rope_parameters": parameters}}).ropes[0]
    assert (rope.theta, rope.sections, rope.is_interleaved, rope.parameters) == (5e6, [24, 20, 20], True, {})


def test_the_language_model_can_be_read_alone(tmp_path: Path) -> None:
    assert read(tmp_path, "Llava", {}, with_encoder=False).vision is None
    assert read(tmp_path, "Qwen2Audio", {}, with_encoder=False).encoder is None


def test_overrides_replace_single_fields_of_objects(tmp_path: Path) -> None:
    fields = {"text_config": {"num_hidden_layers": 3, "hidden_size": 512}}
    overrides = {"text_config": {"hidden_size": 256, "rope_theta": 7.0}, "image_token_index": 5}
    config = read(tmp_path, "Llava", fields, overrides=overrides)
    assert (config.num_layers, config.hidden_size, config.ropes[0].theta) == (3, 256, 7.0)
    assert config.vision is not None and config.vision.image_token_id == 5


def test_dtype_and_quantization_are_those_of_the_whole_model(tmp_path: Path) -> None:
    fields = {"text_config": {"dtype": "float32"}, "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    config = read(tmp_path, "Qwen3VL", fields)
    assert config.dtype == "bfloat16"
    assert config.quantization is not None and config.quantization.weight_dtype == "fp8"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Qwen2VL", {"rope_scaling": {"mrope_section": [16, 24]}}, r"mrope_section \[16, 24\] must have 3 parts"),
        ("Qwen2VL", {"rope_scaling": {"mrope_section": [1, 2, 3]}}, "a sum of 64, half of head_dim"),
        ("Llava", {"vision_config": 3}, "vision_config must be an object, it is 3"),
        ("InternVL", {"vision_config": {"image_size": [448, 224]}}, r"image_size .* two equal ones"),
        ("Voxtral", {}, "audio_token_id must be a positive integer, it is None"),
        (
            "Voxtral",
            {"audio_token_id": 5, "audio_config": {"intermediate_size": 5000}},
            "must be a multiple of its hidden",
        ),
        ("Qwen3ASR", {"audio_config": {"n_window": 40}}, "n_window of audio_config must be 50, it is 40"),
        ("Qwen3ASR", {"audio_config": {"n_window_infer": 250}}, "n_window_infer 250 .* must be a multiple of"),
        ("Qwen2Audio", {"audio_config": 3}, "audio_config must be an object, it is 3"),
        ("Qwen2Audio", {"audio_config": {"num_mel_bins": 0}}, "num_mel_bins must be a positive integer"),
    ],
)
def test_invalid_fields_are_refused_in_one_line(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, name, fields)


def test_an_unknown_part_is_refused_for_native_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the encoder dinov2 is none of clip_vision_model"):
        read(tmp_path, "Llava", {"vision_config": {"model_type": "dinov2"}}, implementation="native")
    with pytest.raises(ConfigError, match="the language model rwkv is none of llama"):
        read(tmp_path, "Llava", {"text_config": {"model_type": "rwkv"}}, implementation="native")
