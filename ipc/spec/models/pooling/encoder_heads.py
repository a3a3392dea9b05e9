"""Classification heads of text encoders, which have layers of their own between the encoder and the classes.

BERT       states of the first token → pooler, tanh → classes
RoBERTa    states of the first token → dense, tanh → classes
DistilBERT states of the first token → dense, ReLU → classes
ModernBERT states of the first token, their mean or each token's → dense, GELU, norm → classes
others     states of each token → classes, for ForTokenClassification
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config_file import ConfigFile
from .heads import activation_of, labels_of
from .pooling_config import DenseConfig, DenseNormConfig, HeadActivation, HeadConfig, HeadLayer

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
DENSE: Mapping[str, tuple[str, HeadActivation, str]] = {  # by family: the layer before the classes, and that of these
    **dict.fromkeys(("Bert", "JinaBert"), ("bert.pooler.dense", "tanh", "classifier")),
    **dict.fromkeys(
        ("Roberta", "XLMRoberta", "Camembert", "JinaEmbeddingsV3", "MPNet"),
        ("classifier.dense", "tanh", "classifier.out_proj"),
    ),
    "DistilBert": ("pre_classifier", "relu", "classifier"),
    "NomicBert": ("nomic_bert.pooler.dense", "tanh", "classifier"),
    "Gte": ("gte.pooler.dense", "tanh", "classifier"),
    "New": ("new.pooler.dense", "tanh", "classifier"),
}


def encoder_head(file: ConfigFile, architecture: str, hidden_size: int) -> HeadConfig | None:
    """Return the head of an encoder's architecture; None if it has none."""
    kind = next((each for each in (SEQUENCE, TOKEN) if architecture.endswith(each)), "")
    family = architecture.removesuffix(kind)
    if not kind:
        return None
    labels = labels_of(file)
    layers: list[HeadLayer] = []
    name = "classifier"
    if family == "ModernBert":
        layers += _modern_layers(file, hidden_size)
    elif kind == SEQUENCE:
        inner, activation, name = DENSE[family]
        layers.append(_dense(inner, hidden_size, hidden_size, activation))
    layers.append(_dense(name, hidden_size, len(labels), "none"))
    return HeadConfig(
        layers=layers, is_of_tokens=kind == TOKEN, activation=activation_of(file, len(labels)), labels=labels
    )


def _modern_layers(file: ConfigFile, hidden_size: int) -> list[HeadLayer]:
    activation = file.text("classifier_activation", "gelu")
    if activation != "gelu":
        file.refuse(f"classifier_activation {activation:.100} is not supported, gelu is")
    dense = DenseConfig(
        weight="head.dense.weight",
        bias="head.dense.bias" if file.flag("classifier_bias") else "",
        num_inputs=hidden_size,
        num_outputs=hidden_size,
        activation="gelu",
    )
    bias = "head.norm.bias" if file.flag("norm_bias") else ""
    eps = file.number("norm_eps", 1e-5)
    return [dense, DenseNormConfig(weight="head.norm.weight", bias=bias, size=hidden_size, eps=eps)]


def _dense(name: str, num_inputs: int, num_outputs: int, activation: HeadActivation) -> DenseConfig:
    return DenseConfig(
        weight=f"{name}.weight",
        bias=f"{name}.bias",
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        activation=activation,
    )
