"""Published checkpoints at full size: config.json is read as transformers reads it, and each tensor is loaded once.

The files in `published/` have names and shapes; nothing is downloaded and no weights exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.published_models import NAMES, PublishedModel, read_published
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.names_only_checkpoint import NamesOnlyCheckpoint, Shape
from tokenloom.workers.machine.parallel import NullGroup
from tokenloom.workers.models.load import read_model, refuse_surplus

NOT_NATIVE_YET = {"ApertusForCausalLM"}  # architectures
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "activation")
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
SAME_NAMES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"),
    *("tie_word_embeddings", "embedding_scale", "residual_scale", "logit_scale", "logit_softcap"),
    *("attention_scale", "attention_softcap"),
)
HAVE_WINDOWS_EVERYWHERE = ("mistral", "phi3", "starcoder2")
MODELS = {name: read_published(name) for name in NAMES}
NATIVE = [name for name in NAMES if MODELS[name].architecture not in NOT_NATIVE_YET]
ONE_EACH = {MODELS[name].architecture: name for name in reversed(NATIVE)}.values()  # of each architecture
DECODERS = [
    name for name in NATIVE if not MODELS[name].config.get("is_encoder_decoder")
]  # others name fields otherwise
FEW_TENSORS = [name for name in ONE_EACH if len(MODELS[name].shapes) <= 5000]


def config_of(model: PublishedModel, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    return load_model_config(folder, implementation="native")


def load(config: ModelConfig, shapes: Mapping[str, Shape], rank: int = 0, num_ranks: int = 1) -> NamesOnlyCheckpoint:
    checkpoint = NamesOnlyCheckpoint(shapes, config.quantization)
    read_model(checkpoint, config, 16, ReferenceOps(), NullGroup(rank, num_ranks))
    if rank == 0:
        refuse_surplus(checkpoint, config)
    return checkpoint


def in_file(model: PublishedModel) -> dict[str, Shape]:
    return model.shapes | dict.fromkeys(model.ignored, (1,))


@pytest.mark.parametrize("name", some(NATIVE, 8))
def test_loading_reads_each_element_once(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    checkpoint = load(config_of(model, tmp_path), in_file(model))
    assert checkpoint.faults(model.ignored) == []


@pytest.mark.parametrize("name", some(FEW_TENSORS, 4))
def test_two_ranks_share_every_element(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    config = config_of(model, tmp_path)
    checkpoint = load(config, in_file(model), 0, 2)
    checkpoint.join(load(config, in_file(model), 1, 2))
    assert checkpoint.faults(model.ignored) == []


def theirs(folder: Path) -> dict[str, Any]:
    """Return the fields of ModelConfig as transformers reads them from config.json."""
    whole = transformers.AutoConfig.from_pretrained(folder)
    text = whole.get_text_config()
    text.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    num_heads, num_layers = text.num_attention_heads, text.num_hidden_layers
    num_kv_heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or num_heads
    if getattr(text, "multi_query", False) and not text.new_decoder_architecture:
        num_kv_heads = 1  # Falcon-7B
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        has_windows = text.model_type in HAVE_WINDOWS_EVERYWHERE
        kinds = ["sliding_attention" if has_windows else "full_attention"] * num_layers
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        "max_position_embeddings": text.max_position_embeddings,
        "eps": next((getattr(text, name) for name in EPSILONS if hasattr(text, name)), 1e-5),  # OLMo 1 has no field
        "windows": [window if kind == "sliding_attention" else None for kind in kinds],
        "thetas": theta_by_kind(getattr(text, "rope_parameters", None)),
        "tie_word_embeddings": getattr(whole, "tie_word_embeddings", False),  # Qwen2-Audio has no field
        "dtype": str(whole.dtype or text.dtype or "float32").removeprefix("torch."),
        **scales(text),
        **head_shape(text),
        **own_heads(text),
    }


def own_heads(text: Any) -> dict[str, Any]:
    """Return the scale of scores, the rotated elements and the heads of Gemma 4's layers."""
    if text.model_type != "gemma4_text":
        return {"own_heads": []}
    layers = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    return {
        "attention_scale": 1.0,
        "rotary_dims": {each.head_dim for each in layers},
        "own_heads": [(each.num_key_value_heads, each.head_dim) for each in layers],
    }


def scales(text: Any) -> dict[str, Any]:
    is_gemma = "gemma" in text.model_type
    has_caps = text.model_type in ("gemma2", "vaultgemma")
    return {
        "embedding_scale": text.hidden_size**0.5 if is_gemma else getattr(text, "embedding_multiplier", 1.0),
        "residual_scale": getattr(text, "residual_multiplier", 1.0),
        "logit_scale": getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0),
        "logit_softcap": getattr(text, "final_logit_softcapping", None) or 0.0,
        "attention_softcap": (text.attn_logit_softcapping or 0.0) if has_caps else 0.0,
    }


def head_shape(text: Any) -> dict[str, Any]:
    """Return the scale of scores, the rotated elements of a head, the layers without positions, and the activation."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scale = getattr(text, "query_pre_attn_scalar", head_dim) ** -0.5
    parameters = getattr(text, "rope_parameters", None) or {}
    entries = [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]
    parts = {entry.get("partial_rotary_factor", 1.0) for entry in entries if entry}
    kinds = getattr(text, "layer_types", None) or []
    without = [layer for layer, has_rope in enumerate(getattr(text, "no_rope_layers", None) or []) if not has_rope]
    if text.model_type == "cohere2" or (text.model_type == "exaone4" and text.sliding_window):
        without = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return {
        "attention_scale": pytest.approx(getattr(text, "attention_multiplier", scale)),
        "rotary_dims": {int(head_dim * part) for part in parts},
        "layers_without_rope": without if parameters else list(range(text.num_hidden_layers)),
        "activation": ACTIVATIONS[next(getattr(text, name) for name in ACTIVATION_FIELDS if getattr(text, name, None))],
    }


def theta_by_kind(parameters: dict[str, Any] | None) -> set[float]:
    if parameters is None:
        return set()  # GPT-2
    entries = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return {float(entry["rope_theta"]) for entry in entries or [parameters]}


def ours(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SAME_NAMES} | {
        "eps": config.norm.eps,
        "windows": [layer.window for layer in config.layers],
        "thetas": {rope.theta for rope in config.ropes},
        "dtype": config.dtype,
        "rotary_dims": {rope.rotary_dim or config.head_dim for rope in config.ropes},
        "layers_without_rope": [number for number, layer in enumerate(config.layers) if layer.rope is None],
        "activation": config.activation.kind,
        "own_heads": own_heads_of(config),
    }


def own_heads_of(config: ModelConfig) -> list[tuple[int, int]]:
    if all(layer.head_dim is None for layer in config.layers):
        return []
    layers = [config.at_layer(layer) for layer in range(config.num_layers)]
    return [(each.num_kv_heads, each.head_dim) for each in layers]


@pytest.mark.parametrize("name", some(DECODERS, 12))
def test_config_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    config = config_of(MODELS[name], tmp_path)
    assert ours(config) == theirs(tmp_path)


@pytest.mark.parametrize("name", some(FEW_TENSORS, 4))
def test_missing_and_surplus_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    config = config_of(model, tmp_path)
    missing = max(tensor for tensor in model.shapes if "attn" in tensor or "attention" in tensor)
    with pytest.raises(ConfigError, match=f"tensor {missing} is missing"):
        load(config, {tensor: shape for tensor, shape in in_file(model).items() if tensor != missing})
    with pytest.raises(ConfigError, match=r"no place for tensor model\.layers\.0\.extra\.weight"):
        load(config, {**in_file(model), "model.layers.0.extra.weight": (1,)})


def experts_of(text: Any, shapes: Mapping[str, Shape]) -> dict[str, Any] | None:
    """Return the fields of ExpertsConfig as transformers reads them, and the layers that have experts in the file."""
    layers = {int(name.split("layers.")[1].split(".")[0]) for name in shapes if ".experts." in name}
    if not layers:
        return None
    is_plain = text.model_type in ("mixtral", "gpt_oss")
    size = text.intermediate_size if is_plain else text.moe_intermediate_size
    num_shared = getattr(text, "n_shared_experts", getattr(text, "moe_num_shared_experts", 0))
    return {
        "num_experts": getattr(text, "num_local_experts", None) or text.num_experts,
        "top_k": getattr(text, "top_k_experts", None) or text.num_experts_per_tok,
        "intermediate_size": size,
        "num_groups": getattr(text, "n_group", 1),
        "top_groups": getattr(text, "topk_group", 1),
        "scale": getattr(text, "routed_scaling_factor", 1.0),
        "shared_size": getattr(text, "shared_expert_intermediate_size", num_shared * size),
        "layers": layers,
    }


def test_an_architecture_that_is_not_native_is_refused(tmp_path: Path) -> None:
    (name,) = set(NAMES) - set(NATIVE)
    with pytest.raises(ConfigError, match="ApertusForCausalLM"):
        config_of(MODELS[name], tmp_path)


@pytest.mark.parametrize("name", some(NATIVE, 12))
def test_experts_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    config = config_of(MODELS[name], tmp_path)
    text = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    expected = experts_of(text, MODELS[name].shapes)
    if expected is None:
        assert config.experts is None
    else:
        assert config.experts is not None
        assert {number for number, layer in enumerate(config.layers) if layer.has_experts} == expected.pop("layers")
        assert {field: getattr(config.experts, field) for field in expected} == expected
