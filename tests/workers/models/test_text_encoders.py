"""The hidden states of each family of text encoders equal those of transformers, whatever else is in a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint, tiny_model
from tokenloom.tests.support.text_encoders import CONFIGS, CPU, encode, load, reference_hidden
from tokenloom.tests.support.today import some

TOLERANCE = 1e-5  # of the largest element
LENGTHS = {"a": 97, "b": 1, "c": 33, "d": 2, "e": 128, "f": 1, "g": 64}
STEPS = ["abcdefg", "gfe", "dacb", "b"]


def prompts_of(seed: int) -> dict[str, list[int]]:
    draw = random.Random(seed)
    return {name: [draw.randrange(4, 271) for _ in range(length)] for name, length in LENGTHS.items()}


def types_of(folder: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return types of the tokens of some prompts, if the model has several."""
    num_types = load_model_config(folder).num_token_types
    if num_types < 2:
        return {}
    return {
        name: [i * num_types // len(ids) for i in range(len(ids))] for name, ids in prompts.items() if name in "acf"
    }


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", some(list(CONFIGS), 6))
@pytest.mark.parametrize("kernels", ["C", "torch"])
def test_hidden_states_equal_transformers_in_any_step(family: str, kernels: str, tmp_path: Path) -> None:
    folder, prompts = tiny_checkpoint(tmp_path, family, seed=1), prompts_of(2)
    types = types_of(folder, prompts)
    expected = reference_hidden(folder, prompts, types)
    ops = select_ops(CPU, torch.float32, enforce_reference=kernels == "torch")
    model = load(folder, ops=ops)
    assert model.is_fused == (kernels == "C")
    for names in STEPS:
        actual = encode(model, [{name: prompts[name] for name in names}], types)
        assert actual.keys() == set(names)
        for name in names:
            assert error(actual[name], expected[name]) <= TOLERANCE, name


def without_windows(config: ModelConfig) -> dict[str, object]:
    return {"layers": [msgspec.structs.replace(layer, window=None) for layer in config.layers]}


def narrower(config: ModelConfig) -> dict[str, object]:
    layers = config.layers
    return {"layers": [msgspec.structs.replace(each, window=each.window and each.window - 1) for each in layers]}


def nearer(config: ModelConfig) -> dict[str, object]:
    assert config.position_bias is not None
    return {"position_bias": msgspec.structs.replace(config.position_bias, max_distance=64)}


def ups_first(config: ModelConfig) -> dict[str, object]:
    return {"names": msgspec.structs.replace(config.names, are_ups_first=True)}


def gates_first(config: ModelConfig) -> dict[str, object]:
    return {"names": msgspec.structs.replace(config.names, are_ups_first=False)}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("roberta", lambda config: {"first_position": 0}),
        ("bert", lambda config: {"norm": msgspec.structs.replace(config.norm, eps=1e-12)}),
        ("bert", lambda config: {"activation": msgspec.structs.replace(config.activation, kind="gelu_tanh")}),
        ("nomic", lambda config: {"ropes": [msgspec.structs.replace(config.ropes[0], theta=60.0)]}),
        ("gte", gates_first),
        ("new", lambda config: {"ropes": [msgspec.structs.replace(config.ropes[0], kind="default")]}),
        ("jina_v2", lambda config: {"position_bias": None}),
        ("jina_v2", lambda config: {"activation": msgspec.structs.replace(config.activation, kind="gelu_tanh")}),
        ("jina_v2", ups_first),
        ("mpnet", nearer),
        ("mpnet", lambda config: {"first_position": 1}),
        ("modernbert", without_windows),
        ("modernbert", narrower),
        ("modernbert", lambda config: {"ropes": config.ropes[::-1]}),
        ("embedding_gemma", narrower),
    ],
)
def test_a_field_that_is_read_wrongly_changes_the_hidden_states(
    family: str, change: Callable[[ModelConfig], dict[str, object]], tmp_path: Path
) -> None:
    folder, prompts = tiny_checkpoint(tmp_path, family, seed=1), {"c": prompts_of(2)["c"]}
    config = load_model_config(folder)
    right, wrong = (
        encode(load(folder, config=each), [prompts])["c"]
        for each in (config, msgspec.structs.replace(config, **change(config)))
    )
    assert error(wrong, right) > 10 * TOLERANCE


@pytest.mark.parametrize("family", some(list(CONFIGS), 2))
def test_bfloat16_is_as_close_to_float32_as_its_rounding(family: str, tmp_path: Path) -> None:
    folder, prompts = tiny_checkpoint(tmp_path, family, seed=3), prompts_of(4)
    expected = reference_hidden(folder, prompts, {})
    actual = encode(load(folder, torch.bfloat16), [prompts], dtype=torch.bfloat16)
    for name in prompts:
        assert error(actual[name], expected[name]) <= 0.03, name


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "hidden_act", "tanh"),
        ("roberta", "max_position_embeddings", 1),
        ("mpnet", "max_position_embeddings", 2),
        ("jina_v2", "use_qk_norm", True),
        ("jina_v2", "position_embedding_type", "absolute"),
        ("jina_v2", "feed_forward_type", "original"),
        ("new", "pack_qkv", False),
        ("new", "logn_attention_scale", True),
        ("mpnet", "relative_attention_num_buckets", 16),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(
    family: str, field: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=field):
        tiny_model(tmp_path, family, **{field: value})
