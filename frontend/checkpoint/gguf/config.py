"""Conversion of a GGUF file's metadata to the fields of a config.json, by architecture.

The keys are defined by ggml-org/ggml's docs/gguf.md and llama.cpp's gguf-py. ARCHITECTURES has the properties of an
architecture that are built into llama.cpp and have no key.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

from ....ipc.errors import ConfigError
from ....ipc.spec.config.gguf_index import GgufTensor
from ....ipc.spec.models.config_file import MAX_LAYERS, MAX_SIZE, is_whole
from .reader import GgufFile

_SIZES = {  # field of every model's config.json → key without the architecture
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")  # families' names of the norms' epsilon


# Tokens that end an answer of every model that has them, whatever the metadata say, unless left out by `end_tokens`.
END_TOKENS = frozenset(
    """<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>
    <|end_of_text|> </s> <eos> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <｜end▁of▁sentence｜>""".split()  # noqa: SIM905
)


def end_tokens(vocabulary: Container[str]) -> set[str]:
    """Return the tokens of a vocabulary that end an answer, by llama.cpp's rules (src/llama-vocab.cpp). In gpt-oss,
    which has <|return|> and <|call|>, <|end|> ends only a message. In a vocabulary with <eos>, such as Gemma's, </s> is
    HTML."""
    found = {token for token in END_TOKENS if token in vocabulary}
    if found & {"<|call|>", "<|calls|>"} and found & {"<|return|>", "<|flush|>"}:
        found.discard("<|end|>")
    if "<eos>" in found:
        found.discard("</s>")
    return found


class Metadata:
    """The metadata of a file, read with checks: ConfigError, with the file and the key, if a value is invalid."""

    def __init__(self, file: GgufFile, links: Mapping[str, Path]) -> None:
        """`links`: GgufTensor.file → the file with the tensor."""
        self._file, self.tensors, self._links = file, file.tensors, links
        ends = end_tokens(file.token_ids)
        self.end_ids = {file.token_ids[token] for token in ends}
        self.other_ids = {
            file.token_ids[token] for token in END_TOKENS - ends if token in file.token_ids
        }  # tokens that do not end an answer here
        self.architecture = str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `<architecture>.<key>`; for a list of equal values, one per layer, that value."""
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def whole(self, key: str) -> Any:
        """Return the value of `<architecture>.<key>` unchanged; None if the file has none."""
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(f"{self.architecture}.{key} must be a number, it is {value!r:.100}")
        return value

    def known_number(self, key: str) -> float | None:
        """Return the number `<architecture>.<key>`, None if the file has none."""
        return None if self.get(key) is None else self.number(key)

    def count(self, key: str, default: float | None = None, most: int = MAX_SIZE, least: int = 0) -> int:
        value = self.number(key, default)
        if value == 0 < least:
            self.refuse(f"{self.architecture}.{key} must be a whole number of at least {least}, it is 0")
        if not 0 <= value <= most or value != int(value):
            self.refuse(f"{self.architecture}.{key} must be a whole number of at most {most}, it is {value!r:.100}")
        return int(value)

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._file.metadata.get(key)
        if value is not None and not (is_whole(value) and -1 <= value <= MAX_SIZE):
            self.refuse(f"{key} must be the id of a token, it is {value!r:.100}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def floats(self, name: str) -> list[float]:
        """Return the elements of a small tensor."""
        tensor: GgufTensor = self.tensors[name]
        if tensor.kind != "F32" or tensor.num_elements > 1 << 16:
            self.refuse(f"tensor {name} is {tensor.kind} {list(tensor.shape)}, floats of 32 bits are expected")
        with self._links[tensor.file].open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{tensor.num_elements}f", file.read(tensor.num_bytes)))

    def refuse(self, reason: str) -> Never:
        raise ConfigError(f"{self._file.path}: {reason}")


Fields = Mapping[str, "Callable[[Metadata], Any] | object"]


@dataclass(frozen=True)
class Architecture:
    """An architecture of config.json, and how tensors of a GGUF file differ from its own."""

    name: str
    fields: Fields = field(default_factory=dict)  # further fields: values, or functions of the metadata
    is_rotated: bool = False  # in rows of query and key, the two rotary halves of a head alternate
    added: float = 0.0  # is to be added to the weights of norms
    renamed: Mapping[str, str] = field(default_factory=dict)  # replaces entries of tensors.IN_LAYER
    scaling: Mapping[str, object] = field(default_factory=dict)  # further fields of rope_scaling


def count(name: str) -> Callable[[Metadata], int]:
    return lambda data: data.count(name, least=1)


def known_number(name: str) -> Callable[[Metadata], float | None]:
    return lambda data: data.known_number(name)


def scaled(name: str, default: float = 1.0) -> Callable[[Metadata], float]:
    return lambda data: float(data.number(name, default) or default)


def present(*tensors: str) -> Callable[[Metadata], bool]:
    return lambda data: all(map(data.has, tensors))


def _query_scalar(num_layers: int) -> Callable[[Metadata], int]:
    """Return the rule for Gemma's query_pre_attn_scalar: the head size, but in the 27B model, with `num_layers` layers,
    hidden size / heads."""

    def rule(data: Metadata) -> int:
        if data.get("block_count") == num_layers:
            return data.count("embedding_length") // max(data.count("attention.head_count"), 1)
        return data.count("attention.key_length")

    return rule


ATTENTION_BIAS = {"attention_bias": present("blk.0.attn_q.bias")}
BIASES = {**ATTENTION_BIAS, "mlp_bias": present("blk.0.ffn_up.bias")}


def _window(data: Metadata) -> int | None:
    return data.count("attention.sliding_window", 0) or None  # 0: none


def _layer_types(data: Metadata) -> list[str] | None:
    """Return the kind of each layer by sliding_window_pattern, a list or a period; None if there is no pattern. Without
    a window all layers are full."""
    pattern = data.whole("attention.sliding_window_pattern")
    layers = range(data.count("block_count", most=MAX_LAYERS))
    if _window(data) is None:
        return ["full_attention" for _ in layers]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in layers]
    if not isinstance(pattern, list):
        return None
    return ["sliding_attention" if each else "full_attention" for each in pattern]


WINDOW = {"sliding_window": _window}
WINDOWS = {**WINDOW, "layer_types": _layer_types}  # only some layers have the window
GEMMA2: Fields = {
    **WINDOWS,
    "attn_logit_softcapping": scaled("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": scaled("final_logit_softcapping", 30.0),
    "query_pre_attn_scalar": _query_scalar(46),
}
EXPERTS: Fields = {
    "num_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
    "norm_topk_prob": True,
}
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    {"num_local_experts": count("expert_count"), "num_experts_per_tok": count("expert_used_count")},
    is_rotated=True,
)
OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    {**ATTENTION_BIAS, **WINDOWS, "rope_local_base_freq": lambda data: data.number("rope.freq_base", 10000.0)},
)
ARCHITECTURES = {
    "arcee": Architecture("ArceeForCausalLM", BIASES, is_rotated=True),
    "cohere2": Architecture("Cohere2ForCausalLM", {**ATTENTION_BIAS, **WINDOWS, "logit_scale": scaled("logit_scale")}),
    "command-r": Architecture(
        "CohereForCausalLM",
        {**ATTENTION_BIAS, "logit_scale": scaled("logit_scale"), "use_qk_norm": present("blk.0.attn_q_norm.weight")},
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", {"use_bias": present("blk.0.attn_q.bias")}),
    "gemma": Architecture("GemmaForCausalLM", added=-1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", GEMMA2, added=-1.0),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {
            **WINDOWS,
            "final_logit_softcapping": known_number("final_logit_softcapping"),
            "query_pre_attn_scalar": _query_scalar(62),
            "rope_local_base_freq": lambda data: data.number("rope.freq_base_swa", 10000.0),
        },
        added=-1.0,
    ),
    "glm4": Architecture("Glm4ForCausalLM", ATTENTION_BIAS),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {
            **WINDOW,
            "attention_bias": True,
            "intermediate_size": count("expert_feed_forward_length"),
            "num_local_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
        },
        renamed={"mlp_norm": "post_attention_norm"},
        scaling={"truncate": False},
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        {
            **BIASES,
            "attention_multiplier": lambda data: data.number("attention.scale"),
            "embedding_multiplier": scaled("embedding_scale"),
            "residual_multiplier": scaled("residual_scale"),
            "logits_scaling": scaled("logit_scale"),
        },
        is_rotated=True,
    ),
    "llama": Architecture("LlamaForCausalLM", BIASES, is_rotated=True),
    "nemotron": Architecture("NemotronForCausalLM", BIASES, added=-1.0),
    "olmo2": Architecture("Olmo2ForCausalLM", ATTENTION_BIAS),
    "phi3": Architecture("Phi3ForCausalLM", WINDOW),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
        },
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", ATTENTION_BIAS),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**ATTENTION_BIAS, **EXPERTS}),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        {**BIASES, "attention_out_bias": present("blk.0.attn_output.bias")},
        renamed={"mlp_norm": "post_attention_norm"},
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", BIASES, is_rotated=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {"use_bias": present("blk.0.attn_q.bias")}),
}


def architecture_of(data: Metadata) -> Architecture:
    if data.architecture == "llama" and data.get("expert_count"):
        return MIXTRAL
    if data.architecture == "olmo2" and data.get("attention.sliding_window"):
        return OLMO3
    if data.architecture not in ARCHITECTURES:
        data.refuse(
            f"architecture {data.architecture!r:.100} is not supported in GGUF, known are {', '.join(ARCHITECTURES)}: "
            "take the model's safetensors"
        )
    return ARCHITECTURES[data.architecture]


def config_of(data: Metadata) -> dict[str, Any]:
    """Return the fields of config.json. ConfigError if the metadata are invalid or the model is not supported."""
    found = architecture_of(data)
    config: dict[str, Any] = {"architectures": [found.name], "dtype": "bfloat16"}
    data.count("block_count", most=MAX_LAYERS)
    config |= {name: data.count(each, least=1) for name, each in _SIZES.items()}
    config["num_key_value_heads"] = data.count("attention.head_count_kv", config["num_attention_heads"], least=1)
    heads = config["num_attention_heads"]
    config["head_dim"] = data.count("attention.key_length", config["hidden_size"] // heads, least=1)
    for name in ("rope.dimension_sections", "nextn_predict_layers"):
        value = data.get(name, 0)
        if any(value) if isinstance(value, list) else value:
            data.refuse(f"{data.architecture}.{name} {value!r:.100} is not supported: take the model's safetensors")
    if (value_length := data.get("attention.value_length", config["head_dim"])) != config["head_dim"]:
        data.refuse(
            f"heads of keys and of values have different sizes, {data.architecture}.attention.key_length "
            f"{config['head_dim']} and {data.architecture}.attention.value_length {value_length!r:.100}: not supported"
        )
    if not data.has("token_embd.weight"):
        data.refuse("tensor token_embd.weight is missing: it is no language model, or a part of one in several files")
    config["vocab_size"] = data.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = not data.has("output.weight")
    epsilon = data.known_number("attention.layer_norm_rms_epsilon")
    epsilon = data.known_number("attention.layer_norm_epsilon") if epsilon is None else epsilon
    config |= {} if epsilon is None else dict.fromkeys(_EPSILONS, epsilon)
    config |= _rope(data, config["head_dim"], found.scaling)
    config |= {f"{name}_token_id": data.token_id(name) for name in ("bos", "eos")}
    for name, rule in found.fields.items():
        config[name] = rule(data) if callable(rule) else rule
    config["quantization_config"] = {"quant_method": "gguf"}
    return {name: value for name, value in config.items() if value is not None}


def _rope(data: Metadata, head_dim: int, more: Mapping[str, object]) -> dict[str, Any]:
    rotary_dim = data.count("rope.dimension_count", head_dim)
    found: dict[str, Any] = {"rope_theta": data.number("rope.freq_base", 10000.0)}
    found["partial_rotary_factor"] = rotary_dim / max(head_dim, 1)
    scaling: dict[str, Any] = {}
    factor = data.known_number("rope.scaling.factor") or data.known_number("rope.scale_linear")
    original = None if data.get(ORIGINAL_LENGTH) is None else data.count(ORIGINAL_LENGTH)
    if data.has("rope_freqs.weight"):
        scaling = {"rope_type": "divided", "factors": data.floats("rope_freqs.weight")}
    elif data.has("rope_factors_long.weight"):
        names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
        scaling = {name: data.floats(tensor) for name, tensor in names.items()}
        scaling |= {"rope_type": "longrope", "attention_factor": data.number("rope.scaling.attn_factor", 1.0)}
        found["original_max_position_embeddings"] = original
    elif (kind := data.get("rope.scaling.type", "linear")) == "yarn" and factor:
        named = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        given = {ours: data.known_number(f"rope.scaling.yarn_{theirs}") for ours, theirs in named.items()}
        if (multiplier := data.known_number("rope.scaling.yarn_log_multiplier")) is not None:
            given |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **given}
        scaling = {name: value for name, value in scaling.items() if value is not None}
    elif kind == "linear" and factor:
        scaling = {"rope_type": kind, "factor": factor}
    elif kind not in ("linear", "none"):
        keys = f"{data.architecture}.rope.scaling.type, {data.architecture}.rope.scaling.factor {factor}"
        data.refuse(f"rope scaling {kind!r:.100} is not supported ({keys})")
    elif rotary_dim < head_dim:  # gives the partial rotation to families that read no partial_rotary_factor, too
        scaling = {"rope_type": "divided", "factors": [1.0] * (int(rotary_dim) // 2)}
    if scaling:
        found["rope_scaling"] = {**scaling, **more}
    return found


def eos_ids(data: Metadata) -> list[int]:
    """Return the sorted ids of the tokens that end an answer: those that the metadata name, and those of
    `end_tokens`."""
    eos, *others = (data.token_id(name) for name in ("eos", "eot", "eom"))
    found = {eos} | ({*others} - data.other_ids) | data.end_ids
    return sorted(each for each in found if each is not None)
