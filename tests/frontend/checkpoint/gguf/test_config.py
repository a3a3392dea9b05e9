"""Metadata as llama.cpp's converter writes them become the config.json of the original model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.checkpoint.gguf.architectures import ARCHITECTURES
from tokenloom.frontend.checkpoint.gguf.config import config_of, eos_ids
from tokenloom.frontend.checkpoint.gguf.metadata import Metadata
from tokenloom.frontend.checkpoint.gguf.reader import GgufFile
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.gguf_index import GgufTensor
from tokenloom.ipc.spec.models.config_file import ConfigFile
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import TEXT
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes
from tokenloom.tests.support.today import some

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPE = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
OF_STATES = {  # keys of layers that keep a state
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "shortconv.l_cache": 3,
}
TENSORS = ("token_embd.weight", "output_norm.weight")


def metadata(architecture: str, tensors: tuple[str, ...] = (), **values: Any) -> Metadata:
    """Return metadata of SHAPE and `values`; in their names __ may stand for a dot."""
    keys = SHAPE | {name.replace("__", "."): value for name, value in values.items()}
    found: dict[str, Any] = {"general.architecture": architecture}
    found |= {f"{architecture}.{name}": value for name, value in keys.items()}
    where = GgufTensor(file="1", kind="F32", shape=(100, 64), offset=0)
    return Metadata(GgufFile(Path("/m.gguf"), found, dict.fromkeys((*TENSORS, *tensors), where)), {})


def model_of(data: Metadata) -> ModelConfig:
    """Return the parts of the model's config that the rules of its family read."""
    config = config_of(data)
    family = TEXT[config["architectures"][0]]
    file = family.prepare(ConfigFile(Path("/config.json"), config))
    rules = {name: rule(file) if callable(rule) else rule for name, rule in family.rules().items()}
    return ModelConfig(architecture="", dtype="", quantization=None, eos_token_ids=[], bos_token_id=None, **rules)


def windows(model: ModelConfig) -> list[int | None]:
    return [layer.window for layer in model.layers]


NOT_ONE_ROPE = {"bert", "gpt2", "nemotron_h", "nemotron_h_moe", "gemma4", "gemma-embedding"}  # none, or two


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - NOT_ONE_ROPE))
def test_all_of_a_head_turns_unless_a_size_is_given(architecture: str) -> None:
    more = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention__scale": 0.1}
    more |= {"expert_shared_feed_forward_length": 32, "attention__key_length": 16, **OF_STATES}
    ropes = model_of(metadata(architecture, **more)).ropes
    assert all(rope.rotary_dim in (0, 16) for rope in ropes) and ropes
    half = model_of(metadata(architecture, rope__dimension_count=8, **more)).ropes
    assert half[0].rotary_dim == 8


def test_olmo_3_is_known_by_its_windows() -> None:
    assert config_of(metadata("olmo2"))["architectures"] == ["Olmo2ForCausalLM"]
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0, "rope__freq_base": 7e5}
    yarn |= {"rope__scaling__original_context_length": 512}
    data = metadata("olmo2", attention__sliding_window=7, attention__sliding_window_pattern=[1, 1, 1, 0], **yarn)
    model = model_of(data)
    assert config_of(data)["architectures"] == ["Olmo3ForCausalLM"] and windows(model) == [7, 7, 7, None]
    assert [(rope.kind, rope.theta) for rope in model.ropes] == [("yarn", 7e5), ("default", 7e5)]
    assert [layer.rope for layer in model.layers] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("phi3", {"attention__sliding_window": 0}, [None] * 4),  # Phi-4's
        ("phi3", {"attention__sliding_window": 7}, [7] * 4),
        ("gemma3", {"attention__sliding_window": 7}, [7] * 4),
        ("gemma3", {"attention__sliding_window": 7, "attention__sliding_window_pattern": 2}, [7, None] * 2),
        ("gemma3", {"attention__sliding_window": 7, "attention__sliding_window_pattern": [True] * 4}, [7] * 4),
        ("gemma3", {"attention__sliding_window": 7, "attention__sliding_window_pattern": [0, 1] * 2}, [None, 7] * 2),
        ("gemma3", {}, [None] * 4),
        ("exaone4", {"attention__sliding_window": 7, "attention__sliding_window_pattern": [1, 0] * 2}, [7, None] * 2),
        ("exaone4", {"attention__sliding_window": 7}, [7, 7, 7, None]),
        ("exaone4", {}, [None] * 4),
    ],
)
def test_windows_are_where_the_file_says(architecture: str, values: dict[str, Any], expected: list[int | None]) -> None:
    model = model_of(metadata(architecture, attention__key_length=16, **values))
    assert windows(model) == expected
    if architecture == "exaone4":  # without a window all layers have positions
        assert [layer.rope for layer in model.layers] == [
            0 if 7 not in expected or window else None for window in expected
        ]
    if architecture == "gemma3":
        assert [layer.rope for layer in model.layers] == [int(window is not None) for window in expected]


def test_mistral_3_is_known_by_its_temperature() -> None:
    assert config_of(metadata("mistral3"))["architectures"] == ["LlamaForCausalLM"]
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0}
    yarn |= {"rope__scaling__original_context_length": 512}
    scaled = metadata("mistral3", attention__temperature_scale=0.25, **yarn)
    assert config_of(scaled)["architectures"] == ["Ministral3ForCausalLM"]
    assert model_of(scaled).query_scaling == (0.25, 512)
    with pytest.raises(ConfigError, match=r"mistral3.attention.temperature_scale is only supported with rope.scaling"):
        config_of(metadata("mistral3", attention__temperature_scale=0.25))


@pytest.mark.parametrize(
    ("tensors", "num_kv_heads", "is_new", "norms"),
    [
        ((), 1, False, ("input_layernorm", "")),  # Falcon 7B
        (("blk.0.attn_norm_2.weight",), 2, True, ("ln_attn", "ln_mlp")),  # 40B
        ((), 2, True, ("input_layernorm", "")),  # Falcon 2
    ],
)
def test_falcons_are_known_by_their_heads_and_norms(
    tensors: tuple[str, ...], num_kv_heads: int, is_new: bool, norms: tuple[str, str]
) -> None:
    data = metadata("falcon", tensors, attention__head_count_kv=num_kv_heads, feed_forward_length=200)
    model = model_of(data)
    assert (model.num_kv_heads, model.intermediate_size, model.is_parallel) == (num_kv_heads, 200, True)
    assert (model.names.input_norm, model.names.mlp_norm) == norms
    assert model.names.qkv_layout == ("by_kv_head" if is_new else "stacked")


GEMMA4 = {
    "attention__key_length": 32,
    "attention__key_length_swa": 16,
    "attention__sliding_window": 7,
    "attention__sliding_window_pattern": [True, False, True, False],
}


def test_gemma_4_has_sizes_for_each_layer() -> None:
    values = GEMMA4 | {"attention__head_count_kv": [2, 1, 2, 1], "feed_forward_length": [96, 96, 192, 192]}
    model = model_of(metadata("gemma4", attention__shared_kv_layers=2, rope__freq_base_swa=500.0, **values))
    sizes = [(layer.head_dim, layer.num_kv_heads, layer.window, layer.intermediate_size) for layer in model.layers]
    assert sizes == [(16, 2, 7, None), (32, 1, None, None), (16, 2, 7, 192), (32, 1, None, 192)]
    assert [layer.kv_layer for layer in model.layers] == [None, None, 0, 1]
    assert [layer.are_values_keys for layer in model.layers] == [False, True] * 2
    assert [(rope.kind, rope.theta) for rope in model.ropes] == [("default", 1e4), ("default", 500.0)]
    values = {name: value for name, value in GEMMA4.items() if "pattern" not in name}
    with pytest.raises(ConfigError, match=r"gemma4.attention.sliding_window_pattern must say for each of 4 layers"):
        config_of(metadata("gemma4", **values))


@pytest.mark.parametrize(
    ("architecture", "values", "words"),
    [
        (
            "gemma4",
            {"feed_forward_length": [96, 192, 96, 192]},
            r"gemma4.feed_forward_length \[96, 192, 96, 192\] is not",
        ),
        ("gemma4", {"attention__head_count_kv": [2, 2]}, r"a list with one for each layer, 4, it is \[2, 2\]"),
        (
            "gemma4",
            {"embedding_length_per_layer_input": 256},
            "256, embeddings for each layer, is not supported in GGUF",
        ),
        ("gemma4", {"rope__dimension_count_swa": 8}, "gemma4.rope.dimension_count_swa 8 of 16 is not supported"),
        ("glm4moe", {"nextn_predict_layers": 4}, "glm4moe.nextn_predict_layers 4 leaves none of 4 layers"),
        ("glm4moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func 1 is not supported, known is 2, sigmoid"),
        ("minimax-m2", {"expert_gating_func": 4}, "minimax-m2.expert_gating_func 4 is not supported"),
    ],
)
def test_what_the_layers_of_an_architecture_lack_is_refused(
    architecture: str, values: dict[str, Any], words: str
) -> None:
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert config_of(metadata(architecture, **experts, **GEMMA4))
    with pytest.raises(ConfigError, match=words):
        config_of(metadata(architecture, **experts, **{**GEMMA4, **values}))


def test_layers_that_predict_further_tokens_are_not_run() -> None:
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    model = model_of(metadata("glm4moe", nextn_predict_layers=1, leading_dense_block_count=1, **experts))
    assert [layer.has_experts for layer in model.layers] == [False, True, True]
    assert "model.layers.3." in model.names.ignored


NEMOTRON: dict[str, Any] = {
    "block_count": 5,
    "attention__head_count_kv": [0, 2, 0, 0, 2],
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": [0, 0, 24, 0, 0],
    "expert_shared_feed_forward_length": 40,
    "nextn_predict_layers": 1,
    **OF_STATES,
}
UPS = ("blk.2.ffn_up_exps.weight", "blk.3.ffn_up.weight")


def test_nemotron_h_s_layers_are_known_by_kv_heads_and_tensors() -> None:
    config = config_of(metadata("nemotron_h_moe", UPS, **NEMOTRON))
    assert config["layers_block_type"] == ["linear_attention", "full_attention", "moe", "mlp"]
    assert (config["moe_intermediate_size"], config["intermediate_size"]) == (24, 100)  # of the key and of the tensor


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"moe_latent_size": 32}, "moe_latent_size, a projection before the experts, has no native layers"),
        (
            {"expert_used_count": [0, 0, 2, 3, 0]},
            r"expert_used_count \[0, 0, 2, 3, 0\] is not supported: layers differ",
        ),
        ({"expert_gating_func": 1}, "nemotron_h_moe.expert_gating_func 1 is not supported"),
    ],
)
def test_experts_that_nemotron_h_s_layers_lack_are_refused(values: dict[str, Any], words: str) -> None:
    assert model_of(metadata("nemotron_h_moe", UPS, **NEMOTRON)).experts is not None
    with pytest.raises(ConfigError, match=words):
        model_of(metadata("nemotron_h_moe", UPS, **(NEMOTRON | values)))


def test_stablelm_s_layers_are_known_by_their_tensors() -> None:
    plain = model_of(metadata("stablelm", ("blk.0.ffn_norm.weight", "blk.0.attn_q.bias")))
    assert plain.has_qkv_bias and not plain.is_parallel and plain.head_norms is None
    large = model_of(metadata("stablelm", ("blk.0.attn_q_norm.weight",)))
    assert large.is_parallel and large.head_norms is not None and not large.has_qkv_bias


def test_gemma_scales_queries_by_the_head_but_in_the_largest_model() -> None:
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        small = model_of(metadata(architecture, attention__key_length=32))
        large = model_of(metadata(architecture, attention__key_length=32, block_count=layers))
        assert small.attention_scale == pytest.approx(32**-0.5) and large.attention_scale == pytest.approx(16**-0.5)


def test_yarn_has_the_magnitude_that_the_file_says() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0}
    yarn |= {"rope__scaling__original_context_length": 512}
    plain = model_of(metadata("qwen3", **yarn)).ropes[0]
    assert plain.kind == "yarn" and plain.parameters == {"factor": 8.0, "original_max_position_embeddings": 512}
    given = model_of(metadata("qwen3", rope__scaling__yarn_attn_factor=1.5, **yarn)).ropes[0]
    assert given.parameters["attention_factor"] == 1.5
    scaled = model_of(metadata("llama", rope__scaling__yarn_log_multiplier=0.5, **yarn)).ropes[0]
    assert scaled.parameters["mscale"] == 1.0 and scaled.parameters["mscale_all_dim"] == 0.5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention.head_count_kv": [2, 4, 2, 2]}, r"llama.attention.head_count_kv must be a number, it is \[2, 4"),
        ({"rope.dimension_count": [8, 8, 4, 8]}, r"llama.rope.dimension_count must be a number, it is \[8, 8"),
        ({"rope.dimension_sections": [8, 4, 4, 0]}, r"llama.rope.dimension_sections \[8, 4, 4, 0\] is not supported"),
        ({"block_count": None}, "llama.block_count must be a number, it is None"),
        ({"rope.scaling.type": "sideways"}, "rope scaling 'sideways' is not supported"),
        ({"attention.head_count": 0}, "llama.attention.head_count must be a whole number of at least 1, it is 0"),
        ({"nextn_predict_layers": 1}, "llama.nextn_predict_layers 1 is not supported"),
        ({"attention.value_length": 8}, "different sizes"),
    ],
)
def test_what_no_model_of_ours_has_is_refused(values: dict[str, Any], words: str) -> None:
    assert config_of(metadata("llama", **{"attention.head_count_kv": [2] * 4}))["num_key_value_heads"] == 2
    with pytest.raises(ConfigError, match=words):
        config_of(metadata("llama", **values))


def test_a_count_of_layers_makes_no_list_before_it_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"block_count must be a whole number of at most 4096, it is 10{9}$"):
        config_of(metadata("gemma3", attention__sliding_window=7, block_count=10**9))


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        ("<|endoftext|> <|return|> <|end|> <|call|>", {"eos": "<|return|>"}, "<|endoftext|> <|return|> <|call|>"),
        ("<|return|> <|end|> <|call|>", {"eos": "<|return|>", "eot": "<|end|>"}, "<|return|> <|call|>"),
        ("<|end|> <|flush|> <|calls|>", {}, "<|flush|> <|calls|>"),
        ("<|end|> <|call|>", {}, "<|end|> <|call|>"),
        ("<|end|> <|return|> <|call|>", {"eos": "<|end|>"}, "<|end|> <|return|> <|call|>"),
        ("<|endoftext|> <|user|> <|end|>", {"eos": "<|endoftext|>"}, "<|endoftext|> <|end|>"),  # Phi
        ("<eos> <end_of_turn> </s>", {"eos": "<eos>"}, "<eos> <end_of_turn>"),  # Gemma
        ("<eos> </s>", {"eos": "</s>"}, "<eos> </s>"),
        ("<s> </s> [INST]", {}, "</s>"),  # Llama 2
        ("<|im_end|> hello <|endoftext|>", {"eom": "hello"}, "<|im_end|> hello <|endoftext|>"),
    ],
)
def test_answers_end_where_the_model_ends_them(tokens: str, named: dict[str, str], ends: str) -> None:
    ids = {token: i for i, token in enumerate(tokens.split())}
    found = {f"tokenizer.ggml.{name}_token_id": ids[token] for name, token in named.items()}
    file = GgufFile(Path("/m.gguf"), {"general.architecture": "llama", **found}, {}, ids)
    data = Metadata(file, {})
    assert eos_ids(data) == sorted(ids[token] for token in ends.split())
    data.end_ids = {77}
    assert 77 in eos_ids(data)


@pytest.mark.parametrize("architecture", some(ARCHITECTURES, 3))
def test_hostile_metadata_are_refused_by_their_keys(architecture: str) -> None:
    more = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.scale": 0.1}
    more |= {"expert_shared_feed_forward_length": 32, "attention.key_length": 16, "attention.value_length": 16}
    more |= {"attention.sliding_window": 7, "attention.sliding_window_pattern": 2, "final_logit_softcapping": 30.0}
    more |= {"rope.freq_base": 1e4, "rope.freq_base_swa": 1e4, "rope.dimension_count": 16, "logit_scale": 0.5}
    more |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 512}
    more |= {"attn_logit_softcapping": 50.0, "embedding_scale": 2.0, "residual_scale": 0.5}
    more |= {"attention.key_length_swa": 16, "attention.shared_kv_layers": 1, "embedding_length_per_layer_input": 0}
    more |= {"expert_shared_count": 1, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1}
    more |= {"expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 1}
    more |= {"expert_group_used_count": 1, "attention.clamp_kqv": 8.0, "use_parallel_residual": True, **OF_STATES}
    more |= {"attention.recurrent_layers": [True, True, True, False], "full_attention_interval": 4}
    more |= {"rope.scaling.finetuned": True}
    values = {f"{architecture}.{name}": value for name, value in {**SHAPE, **more}.items()}
    values |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    where = GgufTensor(file="1", kind="F32", shape=(100, 64), offset=0)

    def read(change: Hostile) -> None:
        found = {"general.architecture": architecture, **change.of(values)}
        data = Metadata(GgufFile(Path("/m.gguf"), found, dict.fromkeys(TENSORS, where)), {})
        config = config_of(data)
        assert all(isinstance(token_id, int) for token_id in eos_ids(data))
        family = TEXT[config["architectures"][0]]
        file = family.prepare(ConfigFile(Path("/config.json"), config))
        with contextlib.suppress(ConfigError):  # by names of config.json: sizes that do not fit together
            assert all(rule(file) is not file for rule in family.rules().values() if callable(rule))

    found = faults(hostile_changes(values), read)
    assert not found, found
