"""Classification heads of text encoders, which have layers of their own between the encoder and the classes.

BERT       states of the first token → pooler, tanh → classes
RoBERTa    states of the first token → dense, tanh → classes
DistilBERT states of the first token → dense, ReLU → classes
all        states of each token → classes, for ForTokenClassification
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config_file import ConfigFile
from .heads import activation_of, labels_of
from .pooling_config import DenseConfig, HeadActivation, HeadConfig, HeadLayer

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
DENSE: Mapping[str, tuple[str, HeadActivation, str]] = {  # by family: the layer before the classes, and that of these
    "Bert": ("bert.pooler.dense", "tanh", "classifier"),
    **dict.fromkeys(("Roberta", "XLMRoberta", "Camembert"), ("classifier.dense", "tanh", "classifier.out_proj")),
    "DistilBert": ("pre_classifier", "relu", "classifier"),
}


def encoder_head(file: ConfigFile, architecture: str, hidden_size: int) -> HeadConfig | None:
    """Return the head of an encoder's architecture; None if it has none."""
    kind = next((each for each in (SEQUENCE, TOKEN) if architecture.endswith(each)), "")
    before = DENSE.get(architecture.removesuffix(kind))
    if not kind or before is None:
        return None
    labels = labels_of(file)
    layers: list[HeadLayer] = []
    name = "classifier"
    if kind == SEQUENCE:
        inner, activation, name = before
        layers.append(_dense(inner, hidden_size, hidden_size, activation))
    layers.append(_dense(name, hidden_size, len(labels), "none"))
    return HeadConfig(
        layers=layers, is_of_tokens=kind == TOKEN, activation=activation_of(file, len(labels)), labels=labels
    )


def _dense(name: str, num_inputs: int, num_outputs: int, activation: HeadActivation) -> DenseConfig:
    return DenseConfig(
        weight=f"{name}.weight",
        bias=f"{name}.bias",
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        activation=activation,
    )
