"""ROTARY_KIN: encoders of text with rotary positions: Nomic, GTE and Jina v3, with BERT's norms, and ModernBERT.

GTE's layers have two names: `Gte` of transformers and of Snowflake, and `New` of Alibaba's code on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .. import model_fields as fields
from ..config_file import ConfigFile
from ..family_rules import Family, Rule, activation, all_layers, flag, head_dim_of, layer_norm, rope
from ..model_config import LayerConfig, NormConfig, RopeConfig, TensorNames
from ..model_fields import FULL, SLIDING
from ..pooling.pooling_config import PoolingConfig
from .bert_kin import BERT_NAMES, BERT_SHAPE, family

NO_TABLE: Mapping[str, Rule] = {"num_learned_positions": 0, "layers": all_layers, "ropes": rope()}
FLASH_NAMES = msgspec.structs.replace(  # of files whose first code was that of flash-attn
    BERT_NAMES,
    embedding_norm="model.emb_ln",
    layers="model.encoder.layers",
    attention_output_norm="norm1",
    mlp_output_norm="norm2",
    qkv="attn.Wqkv",
    output="attn.out_proj",
    gate="mlp.fc12",
    up="mlp.fc11",
    down="mlp.fc2",
)
NOMIC_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
NOMIC_CONSTANTS = {  # fields of older files, and the values that are served
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "causal": False,
    "rotary_scaling_factor": None,
}


def served_alone(file: ConfigFile, constants: Mapping[str, object]) -> bool:
    """Return true. ConfigError for a file of the first code that asks for other layers than those of `constants`."""
    for name, served in constants.items():
        if name in file and file.get(name) != served:
            file.refuse(f"{name} {file.get(name)!s:.100} is not supported, {served} is")
    return True


def nomic_encoder(file: ConfigFile) -> bool:
    return served_alone(file, NOMIC_CONSTANTS)


def nomic_length(file: ConfigFile) -> int:
    """Return the length on which the model was trained: behind it, the first code scales its rotary embedding by the
    length of the batch."""
    return file.positive("max_trained_positions", file.positive("max_position_embeddings"))


NOMIC: Mapping[str, Rule] = {
    **NO_TABLE,
    "is_encoder": nomic_encoder,
    "max_position_embeddings": nomic_length,
    "activation": activation("hidden_act", "silu"),
    "has_qkv_bias": False,
    "has_output_bias": False,
    "has_mlp_bias": False,
    "names": FLASH_NAMES,
}
GTE_CONSTANTS = {  # fields of the hub's code, and the values that are served
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
}


def gte_encoder(file: ConfigFile) -> bool:
    return served_alone(file, GTE_CONSTANTS)


def gte_ropes(file: ConfigFile) -> list[RopeConfig]:
    """Return the rotary embedding. The type ntk of the hub's code divides the frequency of pair i, from 1 on, of n by
    factor^((i / n)^mixed_b), whatever the length of a text."""
    scaling, size = file.part(fields.rope_field(file)), head_dim_of(file)
    if (scaling.get("rope_type") or scaling.get("type")) != "ntk":
        return [fields.rope_of(file, size)]
    plain = fields.rope_of(file.with_fields({"rope_scaling": None, "rope_parameters": None}), size)
    factor, power, num_pairs = scaling.above_zero("factor"), scaling.above_zero("mixed_b", 1.0), size // 2
    factors = [max(factor, 1.0) ** ((pair / num_pairs) ** power) for pair in range(1, num_pairs + 1)]
    return [msgspec.structs.replace(plain, kind="divided", parameters={"factors": factors})]


GTE: Mapping[str, Rule] = {
    **NO_TABLE,
    "is_encoder": gte_encoder,
    "ropes": gte_ropes,
    "activation": activation("hidden_act", "gelu"),
    "has_up_bias": False,
    "names": msgspec.structs.replace(
        BERT_NAMES,
        attention_output_norm="attn_ln",
        mlp_output_norm="mlp_ln",
        qkv="attention.qkv_proj",
        output="attention.o_proj",
        gate_up="mlp.up_gate_proj",
        are_ups_first=True,
        down="mlp.down_proj",
    ),
}
JINA3: Mapping[str, Rule] = {
    **NO_TABLE,
    "names": msgspec.structs.replace(
        FLASH_NAMES, qkv="mixer.Wqkv", output="mixer.out_proj", gate="", up="mlp.fc1", down="mlp.fc2"
    ),
}


def modern_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers: of every third, or as the file says, each token sees all others; of the rest those at most
    half of local_attention away. The first reads the normalized embeddings as they are."""
    period = file.positive("global_attn_every_n_layers", 3)
    default = [SLIDING if layer % period else FULL for layer in range(file.positive("num_hidden_layers"))]
    kinds = fields.listed_kinds(file, (FULL, SLIDING), default, {})
    window = file.positive("local_attention") // 2 + 1
    layers = fields.layers_of(kinds, window, lambda layer, kind: int(kind == SLIDING))
    return [msgspec.structs.replace(layers[0], has_input_norm=False), *layers[1:]]


def modern_ropes(file: ConfigFile) -> list[RopeConfig]:
    return fields.ropes_by_kind(file, head_dim_of(file), 10000.0)


def modern_pooling(file: ConfigFile) -> PoolingConfig:
    kind: Any = file.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
    return PoolingConfig(methods=[kind])


def modern_norm(file: ConfigFile) -> NormConfig:
    return layer_norm("norm_eps", has_bias=file.flag("norm_bias"))(file)


MODERN: Mapping[str, Rule] = {
    **NO_TABLE,
    "is_post_norm": False,
    "num_token_types": 0,
    "norm": modern_norm,
    "embedding_norm": modern_norm,
    "layers": modern_layers,
    "ropes": modern_ropes,
    "activation": activation("hidden_activation", "gelu"),
    "has_qkv_bias": flag("attention_bias"),
    "has_output_bias": flag("attention_bias"),
    "has_mlp_bias": flag("mlp_bias"),
    "pooling": modern_pooling,
    "names": TensorNames(
        embedding="model.embeddings.tok_embeddings",
        embedding_norm="model.embeddings.norm",
        norm="model.final_norm",
        input_norm="attn_norm",
        mlp_norm="mlp_norm",
        qkv="attn.Wqkv",
        output="attn.Wo",
        gate_up="mlp.Wi",
        down="mlp.Wo",
    ),
}
MODERN_SHAPE = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_rope_theta": 160000.0,
}

ROTARY_KIN: dict[str, Family] = {
    **family(
        "NomicBert",
        "nomic_bert",
        ("cls.", "classifier."),
        NOMIC,
        {**BERT_SHAPE, "vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 1000.0},
        renamed=NOMIC_FIELDS,
    ),
    **family(
        "Gte",
        "gte",
        ("lm_head.", "classifier.", "new.pooler."),
        GTE,
        {
            **BERT_SHAPE,
            "vocab_size": 250048,
            "max_position_embeddings": 8192,
            "type_vocab_size": 1,
            "rope_theta": 160000.0,
        },
    ),
    **family(
        "New",
        "new",
        ("lm_head.", "classifier."),
        GTE,
        {**BERT_SHAPE, "vocab_size": 30528, "max_position_embeddings": 2048, "type_vocab_size": 1},
    ),
    **family(
        "JinaEmbeddingsV3",
        "roberta",
        ("lm_head.", "classifier."),
        JINA3,
        {
            "vocab_size": 250002,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "rope_theta": 20000.0,
        },
    ),
    **family(
        "ModernBert",
        "model",
        ("head.", "decoder.", "classifier."),
        MODERN,
        MODERN_SHAPE,
        renamed={"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
    ),
}
