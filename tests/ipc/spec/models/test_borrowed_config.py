"""An architecture without a native model is read by whatever names its sizes have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import ModelConfig, ModelImplementation
from tokenloom.ipc.spec.models.model_file import load_model_config

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}


def read(folder: Path, implementation: ModelImplementation = "auto", **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"], **fields}))
    return load_model_config(folder, implementation=implementation)


def test_sizes_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    model = read(tmp_path, d_model=64, n_layers=3, n_heads=4, max_seq_len=77, vocab_size=99, n_head_kv=2)
    assert (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads) == (64, 3, 4, 2)
    assert (model.head_dim, model.max_position_embeddings, len(model.layers)) == (16, 77, 3)
    assert model.implementation == "transformers"


def test_fields_of_the_language_model_are_nested_in_a_model_that_sees(tmp_path: Path) -> None:
    text = {**SIZES, "eos_token_id": 5, "head_dim": 24, "layer_types": ["linear_attention"] * 3}
    model = read(tmp_path, text_config=text, vocab_size=7, vision_config={"hidden_size": 1})
    assert (model.vocab_size, model.head_dim, model.eos_token_ids, model.has_state) == (99, 24, [5], True)


@pytest.mark.parametrize(
    ("fields", "has_state"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, False),
        ({"layer_types": ["full_attention", "conv", "full_attention"]}, True),
        ({"layers_block_type": ["mamba", "attention", "mamba"]}, True),
        ({"model_type": "falcon_h1"}, True),
        ({"model_type": "new"}, False),
    ],
)
def test_layers_with_states_are_known_by_layer_types_or_model_type(
    fields: dict[str, Any], has_state: bool, tmp_path: Path
) -> None:
    assert read(tmp_path, **SIZES, **fields).has_state is has_state


def test_an_architecture_with_a_native_model_is_borrowed_on_demand_alone(tmp_path: Path) -> None:
    fields = {**SIZES, "architectures": ["LlamaForCausalLM"], "intermediate_size": 8, "max_position_embeddings": 64}
    names: tuple[ModelImplementation, ...] = ("auto", "native", "transformers")
    assert [read(tmp_path, name, **fields).implementation for name in names] == ["native", "native", "transformers"]


@pytest.mark.parametrize(
    ("implementation", "fields", "message"),
    [
        ("native", SIZES, "architecture NewForCausalLM has no native model: leave out --model-impl"),
        ("auto", {**SIZES, "vocab_size": None}, "there is no vocab_size"),
        ("auto", {**SIZES, "hidden_size": "wide"}, "hidden_size must be a positive integer, it is 'wide'"),
        ("auto", {**SIZES, "text_config": 3}, "text_config must be an object, it is 3"),
        ("auto", {**SIZES, "quantization_config": {"quant_method": "mxfp4"}}, "serve no mxfp4"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_by_field(
    implementation: ModelImplementation, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, implementation, **fields)
