"""ModelConfig reads config.json like transformers, in both spellings, and refuses unsupported models."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import tiny_config

FAMILIES: dict[str, Any] = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
}
LENGTH: dict[str, object] = {"original_max_position_embeddings": 512}
YARN = {"factor": 4.0, **LENGTH}
SMALL = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def read(folder: Path, fields: dict[str, object], generation: dict[str, object] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SMALL, **fields}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


VARIANTS: dict[str, dict[str, object]] = {
    "only what has no default": {},
    "grouped": {"num_key_value_heads": 4, "head_dim": 80, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 32, "attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2},
    "window that is off": {"sliding_window": 100, "use_sliding_window": False},
    "window in layers named one by one": {
        "sliding_window": 7,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_shape_equals_that_of_transformers(architecture: str, variant: str, tmp_path: Path) -> None:
    fields = VARIANTS[variant]
    ours = read(tmp_path, {"architectures": [architecture], **fields})
    theirs = FAMILIES[architecture].from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert ours.ropes[0].kind == theirs.rope_parameters["rope_type"]
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    else:
        windows = [None if architecture == "LlamaForCausalLM" else theirs.sliding_window] * 4
    assert [layer.window for layer in ours.layers] == windows


@pytest.mark.parametrize("architecture", FAMILIES)
def test_biases_and_norms_match_transformers_modules(architecture: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    ours = read(tmp_path, {"architectures": [architecture], "attention_bias": True, "mlp_bias": True, **heads})
    make_theirs: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make_theirs(FAMILIES[architecture].from_pretrained(tmp_path))
    names = dict(model.named_parameters())
    layer = "model.layers.0"
    assert ours.has_qkv_bias == (f"{layer}.self_attn.q_proj.bias" in names)
    assert ours.has_output_bias == (f"{layer}.self_attn.o_proj.bias" in names)
    assert ours.has_mlp_bias == (f"{layer}.mlp.down_proj.bias" in names)
    assert (ours.head_norms is not None) == (f"{layer}.self_attn.q_norm.weight" in names)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [({}, [0, 1, 2, 3]), ({"decoder_sparse_step": 2}, [1, 3]), ({"mlp_only_layers": [0, 3]}, [1, 2])],
)
def test_expert_layers_match_transformers(fields: dict[str, object], layers: list[int], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, **fields}
    config = read(tmp_path, fields)
    ours = config.experts
    make_theirs: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make_theirs(transformers.Qwen3MoeConfig.from_pretrained(tmp_path))
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert ours is not None and [i for i, layer in enumerate(config.layers) if layer.has_experts] == layers
    assert [i for i in range(4) if f"model.layers.{i}.mlp.gate.weight" in shapes] == layers
    size = ours.intermediate_size
    assert shapes[f"model.layers.{layers[0]}.mlp.experts.gate_up_proj"] == [ours.num_experts, 2 * size, 256]


@pytest.mark.parametrize(
    ("fields", "kind", "theta", "parameters"),
    [
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 5.0, {"factor": 2.0}),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, **YARN}}, "yarn", 7.0, YARN),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}} | LENGTH, "yarn", 10_000.0, YARN),
    ],
    ids=["old spelling", "new spelling", "original length outside"],
)
def test_each_spelling_of_rope_is_read(
    fields: dict[str, object], kind: str, theta: float, parameters: dict[str, float], tmp_path: Path
) -> None:
    rope = read(tmp_path, fields).ropes[0]
    assert (rope.kind, rope.theta, rope.parameters) == (kind, theta, parameters)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(7, None, [7]), (7, {"eos_token_id": [9, 3]}, [3, 9]), (7, {"eos_token_id": None}, [7]), (None, {}, [])],
)
def test_end_tokens_of_generation_config_replace_those_of_config(
    in_config: int | None, in_generation: dict[str, object] | None, expected: list[int], tmp_path: Path
) -> None:
    assert read(tmp_path, {"eos_token_id": in_config}, in_generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["ViTModel"]}, "architecture ViTModel is not supported: it is neither a causal"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"num_key_value_heads": 5}, "32 attention heads do not divide into 5 KV heads"),
        ({"hidden_size": 250}, "hidden_size 250 does not divide into 32 attention heads"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok 9 is above num_local_experts 8",
        ),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a number, it is inf"),
        ({"rope_theta": True}, "rope_theta must be a number, it is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a positive integer of at most 4096, it is 10{9}"),
        ({"hidden_size": "x" * 10**6}, "hidden_size must be a positive integer, it is 'x{1,100}$"),
        ({"vocab_size": 1 << 40}, "vocab_size must be a positive integer of at most 2147483647, it is 1099511627776"),
        (
            {"architectures": ["CustomForCausalLM"], "n_layer": 10**9, "num_hidden_layers": None},
            "n_layer must be a pos",
        ),
        ({"eos_token_id": ["<eos>"]}, r"eos_token_id must be a list of integers from -1, it is \['<eos>'\]"),
        ({"hidden_act": "mish"}, "hidden_act mish is not supported, known are silu"),
        ({"rope_scaling": {"type": "ntk"}}, "rope type ntk is not supported, known are default"),
        ({"rope_scaling": {"type": "linear", "partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5 is outside"),
        (
            {"rope_scaling": {"type": "linear", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 with rope type linear is not supported: heads turn as a whole",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for full_attention layers are not supported"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types has 1 entries, num_hidden_layers is 4",
        ),
    ],
)
def test_unsupported_models_are_refused_in_one_line(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, fields)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


def test_fields_of_single_layers_take_transformers_layers(tmp_path: Path) -> None:
    fields: dict[str, object] = {"per_layer_config": {"0": {"num_key_value_heads": 1}}}
    assert read(tmp_path, fields).implementation == "transformers"
    with pytest.raises(ConfigError, match="per_layer_config, fields of single layers, has no native layers"):
        load_model_config(tmp_path, implementation="native")


def test_a_damaged_or_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist: --model must name a folder"):
        load_model_config(tmp_path)
    for content in ("{", "3", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json (cannot be read|must hold a JSON object)"):
            load_model_config(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    expected = read(tmp_path, {}, generation={"eos_token_id": 7})
    for path in (tmp_path / "config.json", tmp_path / "generation_config.json"):
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert load_model_config(tmp_path) == expected


def test_overrides_replace_fields_of_the_file(tmp_path: Path) -> None:
    plain = read(tmp_path, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    assert (plain.ropes[0].kind, plain.ropes[0].theta) == ("default", 5e5)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for name in ("rope_scaling", "rope_parameters"):
        model = load_model_config(tmp_path, {name: yarn, "max_position_embeddings": 256})
        assert (model.ropes[0].kind, model.ropes[0].theta, model.max_position_embeddings) == ("yarn", 5e5, 256)
    assert load_model_config(tmp_path, {"rope_theta": 7.0}).ropes[0].theta == 7.0
    assert load_model_config(tmp_path, {"rope_scaling": {**yarn, "rope_theta": 9.0}}).ropes[0].theta == 9.0
    with pytest.raises(ConfigError, match="architecture Odd is not supported"):
        load_model_config(tmp_path, {"architectures": ["Odd"]})


@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
@pytest.mark.parametrize("given", [{}, {"rope_theta": 777.0}])
def test_a_kind_of_layer_without_a_base_of_its_own_takes_that_of_transformers(
    tmp_path: Path, family: str, given: dict[str, float]
) -> None:
    kinds = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    config = {name: value for name, value in tiny_config(family).items() if not name.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps(config | given | {"rope_parameters": kinds}))
    expected = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    found = load_model_config(tmp_path).ropes
    assert [rope.theta for rope in found] == [expected[kind]["rope_theta"] for kind in kinds]
