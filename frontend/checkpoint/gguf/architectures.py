"""ARCHITECTURES: the architectures that are read, by `general.architecture`; and VARIANTS, whose files share a name.

They have the properties that are built into llama.cpp and have no key. How its converter (conversion/ of
ggml-org/llama.cpp) orders rows and shifts norms is a fact of each architecture, proven by the logits of transformers in
`tests/workers/models/test_gguf_families.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .architecture import (
    ATTENTION_BIAS,
    BIASES,
    WINDOW,
    WINDOWS,
    Architecture,
    Fields,
    count,
    known_number,
    num_kv_heads,
    present,
    query_scalar,
    scaled,
)
from .encoders.encoder_architectures import ENCODER_ARCHITECTURES, RERANKERS
from .expert_architectures import EXPERT_ARCHITECTURES, MIXTRAL
from .hybrid_architectures import HYBRID_ARCHITECTURES
from .metadata import Metadata


def _yarn(data: Metadata) -> None:
    """Raise ConfigError if a file scales queries by position but not its rotary embedding, whose length both need."""
    if data.get("rope.scaling.type") != "yarn":
        data.refuse(f"{data.architecture}.attention.temperature_scale is only supported with rope.scaling.type yarn")


GEMMA2: Fields = {
    **WINDOWS,
    "attn_logit_softcapping": scaled("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": scaled("final_logit_softcapping", 30.0),
    "query_pre_attn_scalar": query_scalar(46),
}
SECTIONS = ("rope.dimension_sections",)  # of time, row and column, which are one and the same number for text
LLAMA = Architecture("LlamaForCausalLM", BIASES, is_rotated=True)
FALCON: Fields = {
    "ffn_hidden_size": count("feed_forward_length"),
    "num_kv_heads": num_kv_heads,
    "multi_query": lambda data: num_kv_heads(data) == 1,
    "parallel_attn": True,
    "new_decoder_architecture": lambda data: 1 < num_kv_heads(data) < data.count("attention.head_count"),
    "num_ln_in_parallel_attn": 1,
}
FALCON_40B = Architecture(
    "FalconForCausalLM",
    {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 2},
    renamed={"input_norm": "attn_norm_2", "mlp_norm": "attn_norm"},
)
OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    {**ATTENTION_BIAS, **WINDOWS, "rope_local_base_freq": lambda data: data.number("rope.freq_base", 10000.0)},
)
DENSE: dict[str, Architecture] = {
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
            "query_pre_attn_scalar": query_scalar(62),
            "rope_local_base_freq": lambda data: data.number("rope.freq_base_swa", 10000.0),
        },
        added=-1.0,
    ),
    "glm4": Architecture("Glm4ForCausalLM", ATTENTION_BIAS),
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
    "llama": LLAMA,
    "nemotron": Architecture("NemotronForCausalLM", BIASES, added=-1.0),
    "olmo2": Architecture("Olmo2ForCausalLM", ATTENTION_BIAS),
    "phi3": Architecture("Phi3ForCausalLM", WINDOW),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", ATTENTION_BIAS),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        {**BIASES, "attention_out_bias": present("blk.0.attn_output.bias")},
        renamed={"mlp_norm": "post_attention_norm"},
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", BIASES, is_rotated=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {"use_bias": present("blk.0.attn_q.bias")}),
    "exaone4": Architecture("Exaone4ForCausalLM", WINDOWS, unset=("sliding_window",)),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", ATTENTION_BIAS),  # alpha is in rope.freq_base
    "jais2": Architecture("Jais2ForCausalLM", BIASES),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        {"rope_parameters": _yarn},
        is_rotated=True,
        scaling={"llama_4_scaling_beta": known_number("attention.temperature_scale")},
    ),
    "olmo": Architecture("OlmoForCausalLM", {"clip_qkv": known_number("attention.clamp_kqv")}, is_rotated=True),
    "phi2": Architecture("PhiForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", passed_over=SECTIONS),
    "qwen3vl": Architecture("Qwen3ForCausalLM", ATTENTION_BIAS, passed_over=SECTIONS),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        {
            "use_qkv_bias": present("blk.0.attn_q.bias"),
            "qk_layernorm": present("blk.0.attn_q_norm.weight"),
            "use_parallel_residual": lambda data: not data.has("blk.0.ffn_norm.weight"),
        },
    ),
    # Activations of gptneox, falcon and gpt2 have no key; these are their classes' own.
    "chatglm": Architecture(
        "GlmForCausalLM",
        {"attention_bias": lambda data: data.has("blk.0.attn_qkv.bias") or data.has("blk.0.attn_q.bias")},
    ),
    "falcon": Architecture("FalconForCausalLM", FALCON),
    "gpt2": Architecture("GPT2LMHeadModel", {"n_inner": count("feed_forward_length")}),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {
            "attention_bias": present("blk.0.attn_qkv.bias"),
            "use_parallel_residual": lambda data: data.get("use_parallel_residual", True),
        },
    ),
}
ARCHITECTURES = dict(sorted({**DENSE, **EXPERT_ARCHITECTURES, **HYBRID_ARCHITECTURES, **ENCODER_ARCHITECTURES}.items()))
VARIANTS: Mapping[str, tuple[tuple[Callable[[Metadata], object], Architecture], ...]] = {
    **RERANKERS,
    "falcon": ((present("blk.0.attn_norm_2.weight"), FALCON_40B),),
    "llama": ((lambda data: data.get("expert_count"), MIXTRAL),),
    "mistral3": ((lambda data: not data.get("attention.temperature_scale"), LLAMA),),
    "olmo2": ((lambda data: data.get("attention.sliding_window"), OLMO3),),
}
