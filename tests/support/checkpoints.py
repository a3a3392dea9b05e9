"""Tiny random-weight checkpoints for the tests of every room.

    from tokenloom.tests.support.checkpoints import tiny_checkpoint
    folder = tiny_checkpoint(tmp_path / "model", "qwen3", num_key_value_heads=1, head_dim=80)

The weights are random but the files are real: config, safetensors, generation config, byte-level tokenizer. The
families are FAMILIES, those of `families.py` and ENCODER_DECODERS. For a model with sensible text, use `demo/`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import NATIVE, load_model_config
from tokenloom.scripts.bench.inputs.make_checkpoint import CONFIGS, SHARD_BYTES, write_checkpoint

from . import families, family_checkpoints, hub_encoders, text_encoders, whisper_checkpoints

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
ENCODER_DECODERS = ("whisper",)


def tiny_config(family: str = "llama", **fields: object) -> dict[str, object]:
    """Return config.json of the smallest member of a family, with fields replaced or (None) removed.

    head_dim follows from hidden_size and num_attention_heads unless it is given.
    """
    if family in ENCODER_DECODERS:
        return whisper_checkpoints.whisper_config(**fields)
    if family in families.CONFIGS:
        return _replaced(families.CONFIGS[family], fields)
    if family in text_encoders.CONFIGS:
        return _replaced(text_encoders.CONFIGS[family], fields)
    config = {**CONFIGS[f"tiny-{family}"], **fields}
    resized = {"hidden_size", "num_attention_heads"} & fields.keys()
    if resized and "head_dim" not in fields:
        hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
        assert isinstance(hidden_size, int) and isinstance(num_heads, int)
        config["head_dim"] = hidden_size // num_heads
    return {name: value for name, value in config.items() if value is not None}


def _replaced(config: dict[str, object], fields: dict[str, object]) -> dict[str, object]:
    """Return the config with fields replaced or removed: those of its text_config, if it has one."""
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": _replaced(text, fields)}
    return {name: value for name, value in {**config, **fields}.items() if value is not None}


def tiny_model(folder: Path, family: str, **fields: object) -> ModelConfig:
    """Write config.json alone into `folder` and return the engine's configuration of the model."""
    config = {**tiny_config(family, **fields), "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_model_config(folder)


def tiny_checkpoint(
    folder: Path,
    family: str = "llama",
    dtype: str = "float32",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    **fields: object,
) -> Path:
    """Write a checkpoint with `tiny_config(family, **fields)` into `folder` and return it."""
    if family in ENCODER_DECODERS:
        return whisper_checkpoints.whisper_checkpoint(folder, getattr(torch, dtype), seed, **fields)
    config = tiny_config(family, **fields)
    if config["model_type"] in hub_encoders.MODEL_TYPES:
        return hub_encoders.hub_checkpoint(folder, config, seed)
    is_theirs = family in families.CONFIGS or family in text_encoders.CONFIGS
    write = family_checkpoints.write_family if is_theirs else write_checkpoint
    return write(folder, config, dtype, seed, shard_bytes)


NATIVES = [family for family in (*FAMILIES, *families.CONFIGS) if tiny_config(family)["architectures"][0] in NATIVE]  # type: ignore[index]
