"""TEXT_FAMILIES: the language models of models that take images or audio, by the model_type of text_config.

They are native families; fields that a text_config leaves out have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from . import model_fields as fields
from .config_file import ConfigFile
from .families import ALL_BIASES, FAMILIES, GEMMA3_DEFAULTS, QWEN3
from .family_rules import Family, activation, all_layers, head_dim_of, layer_norm, layers_without_rope
from .model_config import CrossConfig, RopeConfig, TensorNames

Fields = Mapping[str, Any]


def _shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, length: int, **more: Any) -> Fields:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        **more,
    }


LLAMA = _shape(32000, 4096, 11008, 32, 32, 2048, bos_token_id=1, eos_token_id=2)
MISTRAL = _shape(32000, 4096, 14336, 32, 32, 131072, bos_token_id=1, eos_token_id=2)
QWEN = _shape(151936, 4096, 22016, 32, 32, 32768)
QWEN2_VL = _shape(
    152064,
    8192,
    29568,
    80,
    64,
    32768,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_window_layers=80,
    bos_token_id=151643,
    eos_token_id=151645,
)
QWEN3_VL = _shape(151936, 4096, 22016, 32, 32, 128000)
GEMMA3 = {**_shape(262208, 2304, 9216, 26, 8, 131072, bos_token_id=2, eos_token_id=1), **GEMMA3_DEFAULTS}
VOXTRAL = _shape(
    131072,
    3072,
    8192,
    30,
    32,
    131072,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e8,
    bos_token_id=1,
    eos_token_id=2,
)
QWEN3_ASR = _shape(  # of Qwen3-ASR without a text_config
    151936, 2048, 6144, 28, 16, 65536, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
)
MISTRAL_SMALL = _shape(  # of Mistral3 without a text_config
    131072,
    5120,
    32768,
    40,
    32,
    131072,
    model_type="mistral",
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e9,
    sliding_window=None,
)


WHISPER = _shape(51865, 384, 1536, 4, 6, 448, max_source_positions=1500, bos_token_id=50256, eos_token_id=50256)


def mrope(theta: float, sections: list[int], *, is_interleaved: bool) -> Callable[[ConfigFile], list[RopeConfig]]:
    """Return the rule for a rotary embedding by time, row and column. `theta` and `sections` hold for files that do not
    state them."""

    def rule(file: ConfigFile) -> list[RopeConfig]:
        field, size = fields.rope_field(file), head_dim_of(file)
        parameters = file.part(field)
        found = parameters.wholes("mrope_section") or sections
        kind = parameters.get("rope_type") or parameters.get("type")
        kind = "default" if kind in (None, "mrope") else kind
        if len(found) != 3 or (sum(found) != size // 2 and not is_interleaved):
            file.refuse(
                f"mrope_section {found} must have 3 parts with a sum of {size // 2}, half of "
                f"{fields.head_dim_name(file)}: correct rope_scaling or rope_parameters"
            )
        stated = {**parameters.fields(), "rope_type": kind}
        plain = fields.rope_of(file.with_fields({field: stated, "rope_theta": file.number("rope_theta", theta)}), size)
        return [msgspec.structs.replace(plain, sections=found, is_interleaved=is_interleaved)]

    return rule


def _rows_of_clip(file: ConfigFile) -> CrossConfig:
    rows = file.positive("max_source_positions")
    return CrossConfig(num_rows=rows, num_tokens=rows)


WHISPER_DECODER = Family(
    {
        **ALL_BIASES,
        "has_key_bias": False,
        "norm": layer_norm("layer_norm_eps"),
        "activation": activation("activation_function", "gelu", is_gated=False),
        "num_learned_positions": lambda file: file.positive("max_position_embeddings"),
        "layers": layers_without_rope,
        "ropes": [],
        "cross": _rows_of_clip,
        "names": TensorNames(
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            layers="model.decoder.layers",
            norm="model.decoder.layer_norm",
            head="proj_out",
            input_norm="self_attn_layer_norm",
            output="self_attn.out_proj",
            mlp_norm="final_layer_norm",
            up="fc1",
            down="fc2",
        ),
    },
    WHISPER,
    {
        "hidden_size": "d_model",
        "intermediate_size": "decoder_ffn_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "max_position_embeddings": "max_target_positions",
    },
)
QWEN2_VL_TEXT = Family(
    {**FAMILIES["Qwen2ForCausalLM"].own, "ropes": mrope(1e6, [16, 24, 24], is_interleaved=False)},
    {"sliding_window": 4096, **QWEN2_VL},
)
TEXT_FAMILIES: dict[str, Family] = {  # by model_type
    **{
        kind: replace(FAMILIES[architecture], defaults={**shape, **FAMILIES[architecture].defaults})
        for kind, architecture, shape in (
            ("llama", "LlamaForCausalLM", LLAMA),
            ("mistral", "MistralForCausalLM", MISTRAL),
            ("ministral3", "Ministral3ForCausalLM", {}),
            ("qwen2", "Qwen2ForCausalLM", QWEN),
            ("qwen3", "Qwen3ForCausalLM", QWEN),
            ("gemma", "GemmaForCausalLM", {}),
            ("gemma2", "Gemma2ForCausalLM", {}),
            ("phi3", "Phi3ForCausalLM", {}),
            ("granite", "GraniteForCausalLM", {}),
            ("smollm3", "SmolLM3ForCausalLM", {}),
            ("voxtral_text", "LlamaForCausalLM", VOXTRAL),
        )
    },
    "qwen2_vl_text": QWEN2_VL_TEXT,
    "qwen2_5_vl_text": QWEN2_VL_TEXT,
    "qwen3_vl_text": Family(
        {**QWEN3, "layers": all_layers, "ropes": mrope(500000.0, [24, 20, 20], is_interleaved=True)},
        {**FAMILIES["Qwen3ForCausalLM"].defaults, **QWEN3_VL},
    ),
    "gemma3_text": Family(FAMILIES["Gemma3ForCausalLM"].own, GEMMA3),
    "whisper": WHISPER_DECODER,
}
