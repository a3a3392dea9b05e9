"""BIASED_KIN: encoders of text whose attention has biases by distance: MPNet."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..config_file import ConfigFile
from ..family_rules import Family, Rule
from ..model_config import PositionBiasConfig
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

BIASED_KIN: dict[str, Family] = {
    **family("MPNet", "mpnet", ("lm_head.", "classifier."), MPNET, {**BERT_SHAPE, "vocab_size": 30527}),
}
