"""PoolingConfig: how a model makes a result of a prompt's hidden states, in the same fields for every family.

    embed              hidden states → one vector by `methods` → `layers` → cut to dimensions → length 1
    classify, score    hidden states → one vector by `methods` → head's layers → activation
    token_embed        hidden states → `layers` → cut to dimensions → length 1, for each token
    token_classify     hidden states → head's layers → activation, for each token

Architectures say which head there is (`heads.py`), sentence-transformers' files the rest (`sentence_files.py`).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ....params.pooling_params import PoolingMethod, PoolingTask

HeadActivation = Literal["none", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]


class DenseConfig(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """A linear layer, activation(W · x + b). Tensors have their whole names."""

    weight: str
    bias: str = ""  # empty: there is none
    num_inputs: int
    num_outputs: int
    activation: HeadActivation = "none"
    folder: str = ""  # of the file with its tensors, in the checkpoint's folder; empty: the model's own files


class DenseNormConfig(msgspec.Struct, frozen=True, kw_only=True, tag="norm"):
    """A layer norm between dense layers."""

    weight: str
    bias: str = ""
    size: int
    eps: float
    folder: str = ""


class TokenRowsConfig(msgspec.Struct, frozen=True, kw_only=True, tag="token_rows"):
    """Rows of the language model's head as a classifier. With two tokens the result is one logit: that of the second
    less that of the first, whose sigmoid is the probability of the second among the two."""

    token_ids: list[int]
    num_inputs: int


HeadLayer: TypeAlias = DenseConfig | DenseNormConfig | TokenRowsConfig


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a query and a document. `body` has the places {query} and {document}; truncation cuts its end. Each
    part is tokenized by itself."""

    prefix: str
    body: str
    suffix: str


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A classification head. `labels`: the names of the classes."""

    layers: list[HeadLayer]
    is_of_tokens: bool = False  # it has been trained on each token; otherwise on a prompt's vector
    activation: Literal["softmax", "sigmoid", "none"]
    labels: list[str]
    step_tag_id: int | None = None  # the token whose rows hold the rewards of steps
    returned_token_ids: list[int] | None = None


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a result is made of hidden states. The vectors of several `methods` are joined."""

    methods: list[PoolingMethod] = msgspec.field(default_factory=lambda: ["last"])
    layers: list[DenseConfig | DenseNormConfig] = []
    is_normalized: bool = True
    dimensions: list[int] = []  # to which vectors may be cut; empty: any
    head: HeadConfig | None = None
    max_tokens: int | None = None  # at which sentence-transformers cuts texts; None: the model's limit
    prompts: dict[str, str] = {}  # texts to put before a text, by name
    default_prompt: str = ""  # name of the prompt of texts for which the request names none; empty: none
    pair_template: PairTemplate | None = None  # None: the tokenizer's own form of pairs

    def num_outputs(self, hidden_size: int) -> int:
        """Return the size of the vectors, which are not cut."""
        sizes = [layer.num_outputs for layer in self.layers if isinstance(layer, DenseConfig)]
        return sizes[-1] if sizes else hidden_size * len(self.methods)

    @property
    def tasks(self) -> list[PoolingTask]:
        """The tasks that the model serves, its own first."""
        if self.head is None:
            return ["embed", "token_embed"]
        if self.head.is_of_tokens:
            return ["token_classify"]
        return ["score", "classify", "token_classify"] if len(self.head.labels) == 1 else ["classify", "token_classify"]
