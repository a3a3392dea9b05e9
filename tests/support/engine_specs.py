"""The specification of an engine that is never started, for the tests of every room."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenloom.ipc.sockets.endpoints import Endpoints
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.ipc.spec.models.model_config import LayerConfig, ModelConfig, NormConfig, RopeConfig


def new_spec(vocab_size: int = 1000, max_model_len: int = 512, **changes: object) -> EngineSpec:
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=max_model_len,
        layers=[LayerConfig()],
        ropes=[RopeConfig()],
        norm=NormConfig(eps=1e-6),
        attention_scale=8**-0.5,
        dtype="float32",
        tie_word_embeddings=True,
        quantization=None,
        eos_token_ids=[2],
        bos_token_id=1,
    )
    fields: dict[str, object] = {
        "run_id": "0123456789abcdef",
        "run_directory": "/nonexistent",
        "endpoints": Endpoints.in_folder(str(changes.get("run_directory", "/nonexistent"))),
        "config": EngineConfig(),
        "model": model,
        "model_folder": "/nonexistent",
        "tokenizer_folder": "/nonexistent",
        "served_model_name": "sample",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": max_model_len,
    }
    return EngineSpec(**{**fields, **changes})  # type: ignore[arg-type]


def in_folder(spec: EngineSpec, folder: Path, **changes: object) -> EngineSpec:
    """Return the specification with `folder` as its run directory."""
    endpoints = Endpoints.in_folder(folder)
    return msgspec.structs.replace(spec, run_directory=str(folder), endpoints=endpoints, **changes)
