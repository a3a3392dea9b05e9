"""BERT_KIN: encoders of text with BERT's layers: norms behind the sums, and embeddings that are normalized.

They differ in names, in the kinds of positions and in the MLP. Heads of sequences and tokens are no part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..config_file import ConfigFile
from ..families import ALL_BIASES
from ..family_rules import Family, Rule, activation, layer_norm, layers_without_rope
from ..model_config import NormConfig, TensorNames
from ..pooling.pooling_config import PoolingConfig

HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
BERT_NAMES = TensorNames(
    embedding="model.embeddings.word_embeddings",
    positions="model.embeddings.position_embeddings",
    token_types="model.embeddings.token_type_embeddings",
    embedding_norm="model.embeddings.LayerNorm",
    layers="model.encoder.layer",
    norm="",
    input_norm="",
    attention_output_norm="attention.output.LayerNorm",
    mlp_norm="",
    mlp_output_norm="output.LayerNorm",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)


def table_rows(file: ConfigFile) -> int:
    return file.positive("max_position_embeddings")


def after_padding(file: ConfigFile) -> int:
    """Return the first position of RoBERTa's tables: the row behind that of the padding token."""
    return file.whole("pad_token_id") + 1


def length_behind_padding(file: ConfigFile) -> int:
    longest = table_rows(file) - after_padding(file)
    if longest < 1:
        file.refuse(f"max_position_embeddings {table_rows(file)} leaves no position behind pad_token_id")
    return longest


def token_types(file: ConfigFile) -> int:
    return file.whole("type_vocab_size")


def absolute_layers(file: ConfigFile) -> Any:
    """Return the layers of a model whose positions are in a table of embeddings."""
    kind = file.text("position_embedding_type", "absolute")
    if kind != "absolute":
        file.refuse(f"position_embedding_type {kind:.100} is not supported, absolute is")
    return layers_without_rope(file)


def checked_encoder(file: ConfigFile) -> bool:
    """Return true. ConfigError for a model of the family that is a decoder."""
    for name in ("is_decoder", "add_cross_attention"):
        if file.flag(name):
            file.refuse(f"{name} true is not supported: the architecture is served as an encoder")
    return True


ENCODER: Mapping[str, Rule] = {
    "is_encoder": checked_encoder,
    "is_post_norm": True,
    **ALL_BIASES,
    "norm": layer_norm("layer_norm_eps", 1e-12),
    "embedding_norm": layer_norm("layer_norm_eps", 1e-12),
    "activation": activation("hidden_act", "gelu", is_gated=False),
    "layers": absolute_layers,
    "ropes": [],
    "num_learned_positions": table_rows,
    "num_token_types": token_types,
    "tie_word_embeddings": True,
    "pooling": PoolingConfig(methods=["cls"]),
}
BERT_SHAPE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
ROBERTA_SHAPE = {**BERT_SHAPE, "vocab_size": 50265, "pad_token_id": 1}
DISTILBERT_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


def rooted(names: TensorNames, root: str, *spare: str) -> TensorNames:
    """Return the names of files in which the encoder is `root` or the whole model. spare: prefixes of tensors of heads
    beside the encoder that files may have."""
    inner = ("pooler.", "embeddings.position_ids")
    ignored = [*(f"{prefix}{name}" for name in inner for prefix in (f"{root}.", "")), *spare]
    return msgspec.structs.replace(names, roots=[f"{root}.", ""], ignored=ignored)


def family(
    name: str, root: str, spare: tuple[str, ...], own: Mapping[str, Rule], defaults: Mapping[str, Any], **more: Any
) -> dict[str, Family]:
    """Return the family under the names of its classes. `name`: the beginning of the names."""
    names = rooted(own.get("names", BERT_NAMES), root, *spare)
    found = Family({**ENCODER, **own, "names": names}, defaults, **more)
    return {f"{name}{head}": found for head in HEADS}


ROBERTA: Mapping[str, Rule] = {
    "first_position": after_padding,
    "max_position_embeddings": length_behind_padding,
}
DISTILBERT_NORM = NormConfig(kind="layer", eps=1e-12, has_bias=True)
DISTILBERT: Mapping[str, Rule] = {
    "num_token_types": 0,
    "norm": DISTILBERT_NORM,
    "embedding_norm": DISTILBERT_NORM,
    "names": msgspec.structs.replace(
        BERT_NAMES,
        layers="model.transformer.layer",
        attention_output_norm="sa_layer_norm",
        mlp_output_norm="output_layer_norm",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        output="attention.out_lin",
        up="ffn.lin1",
        down="ffn.lin2",
    ),
}

BERT_KIN: dict[str, Family] = {
    **family("Bert", "bert", ("cls.", "classifier."), {}, BERT_SHAPE),
    **family("Roberta", "roberta", ("lm_head.", "classifier."), ROBERTA, ROBERTA_SHAPE),
    **family("XLMRoberta", "roberta", ("lm_head.", "classifier."), ROBERTA, ROBERTA_SHAPE),
    **family("Camembert", "roberta", ("lm_head.", "classifier."), ROBERTA, ROBERTA_SHAPE),
    **family(
        "DistilBert",
        "distilbert",
        ("vocab_", "pre_classifier.", "classifier."),
        DISTILBERT,
        {**BERT_SHAPE, "num_hidden_layers": 6},
        renamed=DISTILBERT_FIELDS,
    ),
}
