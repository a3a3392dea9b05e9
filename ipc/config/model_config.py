"""ModelConfig: the model's shape, parsed from `config.json` and `generation_config.json` without transformers.

The supervisor parses them once and sends the result to every process. Unsupported architectures and missing fields
raise ConfigError with the file, the value and the remedy.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from .quantization_config import QuantizationConfig, parse_quantization

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")

# Supported architectures, with transformers' defaults for fields that a config.json leaves out.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: `kind` is one of ROPE_KINDS, `parameters` are the other fields of the file."""

    kind: str = "default"
    theta: float = 10000.0
    parameters: dict[str, float | int | bool | list[float] | str | None] = {}


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture-of-experts settings."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of each expert
    is_normalized: bool  # divide the weights of the top k by their sum
    layers: list[int]  # layers with experts; the others have a dense MLP of the model's intermediate_size


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only model; sizes count elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    tie_word_embeddings: bool
    has_qkv_bias: bool  # Qwen2, and Llama with attention_bias
    has_output_bias: bool  # Llama with attention_bias
    has_mlp_bias: bool
    has_qk_norm: bool  # Qwen3
    experts: ExpertsConfig | None  # Mixtral and Qwen3-MoE
    quantization: QuantizationConfig | None  # of the layers' matrices
    sliding_windows: list[int | None]  # per layer: positions that a token attends to, its own included; None: all
    eos_token_ids: list[int]  # sorted
    bos_token_id: int | None

    @classmethod
    def load(
        cls, folder: Path, overrides: dict[str, Any] | None = None, generation_folder: Path | None = None
    ) -> ModelConfig:
        """Read config.json, with `overrides` applied, and generation_config.json if it exists, from `folder`.

        `generation_folder`: another folder for generation_config.json.
        """
        raw = read_json(folder / "config.json")
        if overrides:
            raw = _overridden(raw, overrides)
        generation_file = (generation_folder or folder) / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        path = folder / "config.json"
        try:
            return _parse(raw, generation, path)
        except ConfigError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConfigError(f"{path} has an invalid value: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint; ConfigError if it is missing or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: --model must name a folder with a checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, it holds {type(value).__name__}")
    return value


def _overridden(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` with overrides applied. Rotary embeddings have two spellings, rope_scaling and rope_parameters: an
    override of one replaces both."""
    parameters = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    if "rope_theta" in overrides and parameters:
        raw = {**raw, "rope_parameters": {**parameters, "rope_theta": overrides["rope_theta"]}, "rope_scaling": None}
    elif {"rope_scaling", "rope_parameters"} & overrides.keys():
        theta = parameters.get("rope_theta") or raw.get("rope_theta")
        raw = {**raw, "rope_scaling": None, "rope_parameters": None, "rope_theta": theta}
    return raw | overrides


def _parse(raw: dict[str, Any], generation: dict[str, Any], path: Path) -> ModelConfig:
    listed = raw.get("architectures") or ["none"]
    architecture = listed[0] if isinstance(listed, list) else listed
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {architecture} is not supported, known are {', '.join(ARCHITECTURES)}")
    raw = ARCHITECTURES[architecture] | raw
    num_heads = _positive(raw, "num_attention_heads", path)
    hidden_size = _positive(raw, "hidden_size", path)
    num_kv_heads = _positive(raw, "num_key_value_heads", path) if raw.get("num_key_value_heads") else num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"{path}: {num_heads} attention heads do not divide into {num_kv_heads} KV heads")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act {raw['hidden_act']} is not supported, only silu is")
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    is_qwen3 = architecture.startswith("Qwen3")
    # Mistral and Qwen2 ignore attention_bias; all but Llama ignore mlp_bias.
    has_attention_bias = (is_qwen3 or architecture == "LlamaForCausalLM") and bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size", path),
        num_layers=_positive(raw, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, hidden_size, num_heads, path),
        max_position_embeddings=_positive(raw, "max_position_embeddings", path),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, path),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=has_attention_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_attention_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
        has_qk_norm=is_qwen3,
        experts=_experts(raw, architecture, path),
        quantization=parse_quantization(raw.get("quantization_config"), path),
        sliding_windows=_sliding_windows(raw, architecture, path),
        eos_token_ids=sorted(map(operator.index, {eos} if isinstance(eos, int) else set(eos or ()))),
        bos_token_id=raw.get("bos_token_id") if isinstance(raw.get("bos_token_id"), int) else None,
    )


def _positive(raw: dict[str, Any], name: str, path: Path) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {name} must be a positive integer, it is {value!r}")
    return value


def _head_dim(raw: dict[str, Any], hidden_size: int, num_heads: int, path: Path) -> int:
    if raw.get("head_dim") is not None:
        head_dim = _positive(raw, "head_dim", path)
    elif hidden_size % num_heads:
        raise ConfigError(f"{path}: hidden_size {hidden_size} does not divide into {num_heads} attention heads")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim {head_dim} is odd, rotary embeddings need pairs")
    return head_dim


def _rope(raw: dict[str, Any], path: Path) -> RopeConfig:
    """Parse either spelling: transformers 5's `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    old_kind = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or old_kind or "default"
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{path}: rope type {kind} is not supported, known are {', '.join(ROPE_KINDS)}")
    partial = parameters.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor {partial} is not supported, only 1.0 is")
    for name, value in parameters.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: rope parameters of their own for {name} layers are not supported")
    original_length = raw.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn") and original_length is not None:
        parameters["original_max_position_embeddings"] = original_length
    return RopeConfig(kind=kind, theta=float(theta), parameters=parameters)


def _experts(raw: dict[str, Any], architecture: str, path: Path) -> ExpertsConfig | None:
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    is_mixtral = architecture == "MixtralForCausalLM"
    name = (
        "num_local_experts" if "num_local_experts" in raw else "num_experts"
    )  # transformers writes the first name for both
    num_experts, top_k = _positive(raw, name, path), _positive(raw, "num_experts_per_tok", path)
    if top_k > num_experts:
        raise ConfigError(f"{path}: num_experts_per_tok {top_k} is above {name} {num_experts}")
    step = 1 if is_mixtral else int(raw.get("decoder_sparse_step") or 1)
    dense = set() if is_mixtral else set(raw.get("mlp_only_layers") or ())
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=_positive(raw, "intermediate_size" if is_mixtral else "moe_intermediate_size", path),
        is_normalized=is_mixtral or bool(raw.get("norm_topk_prob")),
        layers=[i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0],
    )


def _sliding_windows(raw: dict[str, Any], architecture: str, path: Path) -> list[int | None]:
    num_layers = int(raw["num_hidden_layers"])
    window = raw.get("sliding_window")
    is_qwen = architecture.startswith("Qwen")
    if window is None or architecture == "LlamaForCausalLM" or (is_qwen and not raw.get("use_sliding_window")):
        return [None] * num_layers
    window = _positive(raw, "sliding_window", path)
    if not is_qwen or architecture == "Qwen3MoeForCausalLM":
        return [window] * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = int(raw["max_window_layers"])
        return [window if layer >= first else None for layer in range(num_layers)]
    if len(layer_types) != num_layers:
        raise ConfigError(f"{path}: layer_types has {len(layer_types)} entries, num_hidden_layers is {num_layers}")
    return [window if kind == "sliding_attention" else None for kind in layer_types]
