"""Each dense family's logits equal those of transformers in float32, however the tokens are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from msgspec.structs import replace

from tokenloom.ipc.models.audio_families import AUDIO_FAMILIES
from tokenloom.ipc.models.families import FAMILIES
from tokenloom.ipc.models.model_config import ModelConfig
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.ipc.models.vision_families import VISION_FAMILIES
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS
from tokenloom.tests.support.family_checkpoints import reference_model
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule, schedule
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.models.decoder import read_model
from tokenloom.workers.parallel import ParallelGroup
from tokenloom.workers.weights.checkpoint import Checkpoint

Change: TypeAlias = Callable[[ModelConfig], dict[str, object]]  # fields in place of a config's

EXPERTS = {"gemma4_moe", "gpt_oss", "glm4_moe", "dots1", "ernie4_5_moe", "qwen2_moe"}  # test_experts.py
DENSE = sorted(
    family
    for family, config in CONFIGS.items()
    if config["architectures"][0] in FAMILIES | VISION_FAMILIES | AUDIO_FAMILIES and family not in EXPERTS
)
TOLERANCE = 1e-5  # of the largest logit


@pytest.mark.parametrize("family", some(DENSE, 8))
def test_logits_equal_transformers_under_any_schedule(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    check(folder, {"a": 97, "b": 1, "c": 33, "d": 2}, max_model_len=128)


@pytest.mark.parametrize("family", some(["phi3", "phi4_mini"], 1))
def test_longrope_uses_the_long_factors_where_contexts_may_be_long(family: str, tmp_path: Path) -> None:
    """Transformers chooses the factors by the length of each prompt, so all are longer than the original length."""
    check(tiny_checkpoint(tmp_path, family, seed=1), {"a": 140, "b": 129}, max_model_len=256)


def check(folder: Path, lengths: dict[str, int], max_model_len: int) -> None:
    tokens = prompts_of(lengths, load_model_config(folder).vocab_size, seed=2)
    expected = reference_logits(folder, tokens)
    run = PagedRun(load(folder, max_model_len=max_model_len), 8)
    actual = run_schedule(run, tokens, schedule(lengths, seed=3))
    for name in tokens:
        tolerance = TOLERANCE * expected[name].abs().max().item()
        torch.testing.assert_close(actual[name], expected[name], atol=tolerance, rtol=0)


@torch.inference_mode()
def reference_logits(folder: Path, tokens: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    model = reference_model(folder)
    return {name: model(torch.tensor([ids])).logits[0] for name, ids in tokens.items()}


def norm(**fields: object) -> Change:
    return lambda config: {"norm": replace(config.norm, **fields)}


def act(kind: str) -> Change:
    return lambda config: {"activation": replace(config.activation, kind=kind)}


def ropes(**fields: object) -> Change:
    return lambda config: {"ropes": [replace(rope, **fields) for rope in config.ropes]}


def layers(**fields: object) -> Change:
    return lambda config: {"layers": [replace(layer, **fields) for layer in config.layers]}


def head_norms(**fields: object) -> Change:
    return lambda config: {"head_norms": replace(config.head_norms, **fields)}


def names(**fields: object) -> Change:
    return lambda config: {"names": replace(config.names, **fields)}


def field(name: str, value: object) -> Change:
    return lambda config: {name: value}


FLIPS: dict[tuple[str, str], Change] = {
    ("gemma", "embedding_scale"): field("embedding_scale", 1.0),
    ("gemma", "norm.offset"): norm(offset=0.0),
    ("gemma", "norm.eps"): norm(eps=1e-6),
    ("gemma", "activation.kind"): act("silu"),
    ("gemma2", "attention_softcap"): field("attention_softcap", 0.0),
    ("gemma2", "logit_softcap"): field("logit_softcap", 0.0),
    ("gemma2", "attention_scale"): field("attention_scale", 0.3),
    ("gemma2", "layers.window"): layers(window=None),
    ("gemma3_text", "layers.rope"): layers(rope=0),
    ("gemma3_text", "ropes.theta"): ropes(theta=99.0),
    ("gemma3_text", "head_norms"): field("head_norms", None),
    ("granite", "residual_scale"): field("residual_scale", 1.0),
    ("granite", "logit_scale"): field("logit_scale", 1.0),
    ("granite", "embedding_scale"): field("embedding_scale", 1.0),
    ("phi", "is_parallel"): field("is_parallel", False),
    ("phi", "ropes.rotary_dim"): ropes(rotary_dim=0),
    ("phi", "has_head_bias"): field("has_head_bias", False),
    ("phi", "has_qkv_bias"): field("has_qkv_bias", False),
    ("phi", "has_output_bias"): field("has_output_bias", False),
    ("phi", "has_mlp_bias"): field("has_mlp_bias", False),
    ("glm", "ropes.is_paired"): ropes(is_paired=False),
    ("glm4", "names.attention_output_norm"): names(attention_output_norm=""),
    ("glm4", "names.mlp_output_norm"): names(mlp_output_norm=""),
    ("olmo", "norm.kind"): norm(kind="rms"),
    ("olmo", "qkv_clip"): field("qkv_clip", 0.0),
    ("olmo2", "names.input_norm"): names(input_norm="post_attention_layernorm"),
    ("hunyuan_v1_dense", "head_norms.is_after_rope"): head_norms(is_after_rope=False),
    ("cohere2", "layers.rope"): layers(rope=0),
    ("smollm3", "layers.rope"): layers(rope=0),
    ("exaone4", "layers.rope"): layers(rope=0),
    ("ministral3", "query_scaling"): field("query_scaling", None),
    ("starcoder2", "norm.has_bias"): norm(has_bias=False),
    ("starcoder2", "activation.kind"): act("relu"),
    ("nemotron", "norm.offset"): norm(offset=0.0),
    ("nemotron", "activation.kind"): act("relu"),
    ("gpt2", "num_learned_positions"): field("num_learned_positions", 0),
    ("gpt_neox", "is_parallel"): field("is_parallel", False),
    ("gpt_neox", "names.qkv_layout"): names(qkv_layout="stacked"),
    ("falcon_40b", "names.mlp_norm"): names(mlp_norm="ln_attn"),
    ("phi3", "ropes.parameters"): lambda config: {
        "ropes": [replace(rope, parameters={**rope.parameters, "attention_factor": 1.0}) for rope in config.ropes]
    },
}


@pytest.mark.parametrize(("family", "flipped"), some(list(FLIPS), 8))
def test_each_field_changes_the_logits(family: str, flipped: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    config = load_model_config(folder)
    changed = replace(config, **FLIPS[family, flipped](config))
    assert changed != config
    tokens = prompts_of({"a": 40}, config.vocab_size, seed=2)
    logits = []
    for each in (config, changed):
        with Checkpoint(folder, torch.float32, CPU, None) as checkpoint:
            model = read_model(checkpoint, each, 128, ReferenceOps(), ParallelGroup())
        logits.append(run_schedule(PagedRun(model, 8), tokens, [{"a": 40}])["a"])
    assert (logits[0] - logits[1]).abs().max() > 10 * TOLERANCE * logits[0].abs().max()
