"""Rotary embeddings equal transformers' own, for each way of stretching a context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import RopeConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.workers.layers.rotary import make_rotary, rotary_frequencies, rotations_at, section_axes

CPU = torch.device("cpu")
LENGTH = 4096
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
KINDS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, original length left out": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 2.0},
    "yarn, own attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale, not truncated": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}


def config_of(parameters: dict[str, object], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=LENGTH,
        rope_parameters=dict(parameters),
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_rotated_heads_equal_transformers(kind: str, head_dim: int, tmp_path: Path) -> None:
    theirs = config_of(KINDS[kind], head_dim)
    theirs.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    torch.manual_seed(0)
    positions = torch.cat((torch.arange(50), torch.randint(LENGTH, (200,)), torch.tensor([LENGTH - 1])))
    query, key = torch.randn(1, 2, 251, head_dim), torch.randn(1, 1, 251, head_dim)
    cos, sin = LlamaRotaryEmbedding(theirs)(query, positions[None])
    expected = torch.cat(apply_rotary_pos_emb(query, key, cos, sin), dim=1)[0].transpose(0, 1)

    heads = torch.cat((query, key), dim=1)[0].transpose(0, 1).contiguous()
    rotary = make_rotary(ours, ours.ropes[0], LENGTH, CPU)
    assert rotary.cos_sin is not None
    ReferenceOps().rotate(heads, positions, rotary.cos_sin)
    torch.testing.assert_close(heads, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("is_stretched", [False, True])
@pytest.mark.parametrize(
    ("theirs", "sections", "is_interleaved"),
    [(Qwen2VLRotaryEmbedding, [16, 24, 24], False), (Qwen3VLTextRotaryEmbedding, [24, 20, 20], True)],
)
def test_rotations_in_time_row_and_column_have_the_bits_of_transformers(
    theirs: Any, sections: list[int], is_interleaved: bool, is_stretched: bool
) -> None:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if is_stretched:
        parameters = {**parameters, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = config_of({**parameters, "mrope_section": sections}, 128)
    positions = torch.randint(LENGTH, (3, 700), generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(config)(torch.zeros(1), positions[:, None])
    rope = RopeConfig(kind=parameters.pop("rope_type"), theta=1e6, sections=sections, is_interleaved=is_interleaved)
    rope = msgspec.structs.replace(rope, parameters=parameters)
    frequencies, magnitude = rotary_frequencies(rope, 128, LENGTH, LENGTH)
    angles = torch.arange(LENGTH, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude
    found = rotations_at(positions, section_axes(rope, 128), table)
    assert torch.equal(found, torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1))


@pytest.mark.parametrize("max_model_len", [LENGTH + 1, 3 * LENGTH])
def test_dynamic_rope_uses_the_base_of_the_longest_context(max_model_len: int) -> None:
    parameters = KINDS["dynamic"]
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config_of(parameters, 64), CPU, seq_len=max_model_len)
    rope = RopeConfig(kind="dynamic", theta=10000.0, parameters={"factor": 4.0})
    frequencies, magnitude = rotary_frequencies(rope, 64, LENGTH, max_model_len)
    torch.testing.assert_close(frequencies, expected)
    assert magnitude == 1.0


def test_dynamic_rope_keeps_the_base_up_to_the_original_length() -> None:
    rope = RopeConfig(kind="dynamic", theta=10000.0, parameters={"factor": 4.0})
    plain, _ = rotary_frequencies(RopeConfig(), 64, LENGTH, LENGTH)
    for max_model_len in (1, 100, LENGTH):
        assert torch.equal(rotary_frequencies(rope, 64, LENGTH, max_model_len)[0], plain)


@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic"])
def test_missing_parameter_is_named(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"rope type {kind} needs the number factor"):
        rotary_frequencies(RopeConfig(kind=kind), 64, LENGTH, LENGTH)
