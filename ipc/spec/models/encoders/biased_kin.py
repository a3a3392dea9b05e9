"""BIASED_KIN: encoders of text whose attention has biases by distance: MPNet and Jina v2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..config_file import ConfigFile
from ..family_rules import Family, Rule, layers_without_rope
from ..model_config import ActivationConfig, LayerConfig, PositionBiasConfig
from ..pooling.encoder_heads import SEQUENCE
from ..pooling.pooling_config import PoolingConfig
from .bert_kin import BERT_NAMES, BERT_SHAPE, family, table_rows

NUM_BUCKETS = 32
MPNET_FIRST = 2  # row of the first position; transformers takes the padding token for 1, whatever config.json says


def mpnet_bias(file: ConfigFile) -> PositionBiasConfig:
    num_buckets = file.positive("relative_attention_num_buckets", NUM_BUCKETS)
    if num_buckets != NUM_BUCKETS:
        file.refuse(f"relative_attention_num_buckets {num_buckets} is not supported, {NUM_BUCKETS} is")
    return PositionBiasConfig(kind="buckets", num_buckets=num_buckets)


def mpnet_length(file: ConfigFile) -> int:
    longest = table_rows(file) - MPNET_FIRST
    if longest < 1:
        file.refuse(f"max_position_embeddings {table_rows(file)} leaves no position from {MPNET_FIRST} on")
    return longest


MPNET: Mapping[str, Rule] = {
    "num_token_types": 0,
    "first_position": MPNET_FIRST,
    "max_position_embeddings": mpnet_length,
    "position_bias": mpnet_bias,
    "names": msgspec.structs.replace(
        BERT_NAMES,
        position_bias="model.encoder.relative_attention_bias",
        attention_output_norm="attention.LayerNorm",
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        output="attention.attn.o",
    ),
}


def jina_layers(file: ConfigFile) -> list[LayerConfig]:
    kind = file.text("position_embedding_type", "absolute")
    if kind != "alibi":
        file.refuse(f"position_embedding_type {kind:.100} is not supported, alibi is")
    if file.flag("use_qk_norm"):
        file.refuse("use_qk_norm true is not supported: its layers normalize the output of attention twice")
    return layers_without_rope(file)


def jina_activation(file: ConfigFile) -> ActivationConfig:
    kind: Any = file.choice("feed_forward_type", {"geglu": "gelu", "reglu": "relu"}, "original")
    return ActivationConfig(kind=kind)


def jina_pooling(file: ConfigFile) -> PoolingConfig:
    """Return how vectors are made. The head for sequences reads the first token, whatever emb_pooler says."""
    listed = file.get("architectures", [""])
    if str(listed[0]).endswith(SEQUENCE):
        return PoolingConfig(methods=["cls"])
    kind: Any = file.choice("emb_pooler", {"cls": "cls", "mean": "mean", "last": "last", "max": "max"}, "cls")
    return PoolingConfig(methods=[kind])


JINA2: Mapping[str, Rule] = {
    "num_learned_positions": 0,
    "layers": jina_layers,
    "position_bias": PositionBiasConfig(kind="slopes"),
    "activation": jina_activation,
    "has_up_bias": False,
    "pooling": jina_pooling,
    "names": msgspec.structs.replace(
        BERT_NAMES, gate_up="mlp.gated_layers", down="mlp.wo", mlp_output_norm="mlp.layernorm"
    ),
}

BIASED_KIN: dict[str, Family] = {
    **family("MPNet", "mpnet", ("lm_head.", "classifier."), MPNET, {**BERT_SHAPE, "vocab_size": 30527}),
    **family("JinaBert", "bert", ("cls.", "classifier."), JINA2, BERT_SHAPE),
}
