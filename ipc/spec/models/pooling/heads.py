"""Classification heads of architectures: Qwen3ForSequenceClassification is Qwen3's layers with a head of its own.

`split` finds the layers' family; `head_of` reads the head's shape, labels and activation from config.json.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

from ..config_file import ConfigFile, read_json
from .pooling_config import DenseConfig, HeadConfig, HeadLayer, PairTemplate, TokenRowsConfig

HeadKind = Literal["none", "sequence", "token", "reward", "steps"]
KINDS: dict[str, HeadKind] = {
    "Model": "none",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForRewardModel": "reward",
    "ForProcessRewardModel": "steps",
}
CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of families with a language model's head
CLASSIFIERS = ("FalconForTokenClassification", "GPT2ForTokenClassification", "GPTNeoXForTokenClassification")
ACTIVATIONS: dict[str, Literal["softmax", "sigmoid", "none"]] = {  # torch's classes
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_PAIRS = PairTemplate(  # the published form of Qwen3-Reranker
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    body=f"<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


class Headed(NamedTuple):
    """The family whose layers an architecture has, and the kind of its head."""

    family: str
    kind: HeadKind


def split(architecture: str, families: Collection[str]) -> Headed | None:
    """Return the family, one of `families`, of an architecture that has another head than the family's, or none. None
    if there is no such family."""
    for end, kind in KINDS.items():
        if not architecture.endswith(end) or architecture in families:
            continue
        base = architecture.removesuffix(end)
        for name in (base, base.removesuffix("Text")):  # Gemma3TextModel is a part of Gemma3ForCausalLM
            found = next((name + tail for tail in CAUSAL if name + tail in families), None)
            if found is not None:
                return Headed(found, kind)
    return None


def labels_of(file: ConfigFile) -> list[str]:
    """Return the names of the classes: id2label, or LABEL_0, LABEL_1 … as transformers names them."""
    named = file.part("id2label").fields()
    if named and sorted(named) != sorted(map(str, range(len(named)))):
        file.refuse(f"{file.spelled('id2label')} must name the classes 0 to {len(named) - 1}")
    count = file.positive("num_labels", len(named) or 2)
    if named and len(named) == count:
        return [str(named[str(number)]) for number in range(count)]
    return [f"LABEL_{number}" for number in range(count)]


def activation_of(file: ConfigFile, num_labels: int) -> Literal["softmax", "sigmoid", "none"]:
    """Return the activation of a classifier: sentence-transformers' own, or that of problem_type, or else probabilities
    that fit the number of classes."""
    stated = file.part("sentence_transformers").get("activation_fn") or file.get("sbert_ce_default_activation_function")
    if stated is not None:
        name = str(stated).rpartition(".")[2]
        if name not in ACTIVATIONS:
            file.refuse(
                f"the classifier's activation {stated!s:.100} is not supported, known are {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]
    problem = file.text("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels < 2 or problem == "multi_label_classification" else "softmax"


def head_of(file: ConfigFile, architecture: str, kind: HeadKind, hidden_size: int) -> HeadConfig | None:
    """Return the head of an architecture; None if it has none."""
    if kind == "none":
        return None
    if kind == "sequence" and "classifier_from_token" in file:
        return _token_head(file, hidden_size)
    labels = labels_of(file)
    if kind in ("reward", "steps"):
        return _reward_head(file, kind, hidden_size)
    name = "classifier" if architecture in CLASSIFIERS else "score"
    is_of_tokens = kind == "token"
    last = DenseConfig(
        weight=f"{name}.weight",
        bias=f"{name}.bias" if is_of_tokens else "",
        num_inputs=hidden_size,
        num_outputs=len(labels),
    )
    activation = activation_of(file, len(labels))
    return HeadConfig(layers=[last], is_of_tokens=is_of_tokens, activation=activation, labels=labels)


def pair_template_of(architecture: str, head: HeadConfig) -> PairTemplate | None:
    """Return the published form of pairs of a language model that is used as a reranker; None if none is known."""
    compares_tokens = len(head.layers) == 1 and isinstance(head.layers[0], TokenRowsConfig)
    return QWEN3_PAIRS if compares_tokens and architecture.startswith("Qwen3") else None


def head_tensors(layers: Collection[HeadLayer]) -> list[str]:
    """Return the names of the tensors of the layers that are among the model's own."""
    own = [layer for layer in layers if not isinstance(layer, TokenRowsConfig) and not layer.folder]
    return [name for layer in own for name in (layer.weight, layer.bias) if name]


def _reward_head(file: ConfigFile, kind: HeadKind, hidden_size: int) -> HeadConfig:
    """Return Qwen2.5-Math's head: two linear layers with a ReLU between them. It gives each token a reward, or
    probabilities that a step is wrong or right."""
    num_labels = file.positive("num_labels", 1 if kind == "reward" else 2)
    layers: list[HeadLayer] = [
        DenseConfig(
            weight=f"score.{index}.weight",
            bias=f"score.{index}.bias",
            num_inputs=hidden_size,
            num_outputs=hidden_size if index == 0 else num_labels,
            activation="relu" if index == 0 else "none",
        )
        for index in (0, 2)
    ]
    labels = [f"LABEL_{number}" for number in range(num_labels)]
    activation: Literal["softmax", "none"] = "none" if num_labels == 1 else "softmax"
    return HeadConfig(layers=layers, is_of_tokens=True, activation=activation, labels=labels)


def _token_head(file: ConfigFile, hidden_size: int) -> HeadConfig:
    """Return the head whose logits are those of the tokens in classifier_from_token, vLLM's field."""
    tokens = file.get("classifier_from_token")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(each, str) for each in tokens):
        file.refuse(f"classifier_from_token must be a list of tokens, it is {tokens!r:.100}")
    vocabulary = _vocabulary(file.path.parent)
    missing = [each for each in tokens if each not in vocabulary]
    if missing:
        file.refuse(f"classifier_from_token has {missing[0]!r:.100}, which is no token of tokenizer.json")
    labels = [tokens[-1]] if len(tokens) <= 2 else tokens
    rows = TokenRowsConfig(token_ids=[vocabulary[each] for each in tokens], num_inputs=hidden_size)
    return HeadConfig(layers=[rows], activation=activation_of(file, len(labels)), labels=labels)


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens of a tokenizer.json by their spelling."""
    tokenizer = read_json(folder / "tokenizer.json")
    listed = tokenizer.get("model", {}).get("vocab", {})
    found = dict(listed) if isinstance(listed, dict) else {each[0]: index for index, each in enumerate(listed)}
    return found | {each["content"]: each["id"] for each in tokenizer.get("added_tokens", [])}
