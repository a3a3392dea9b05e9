"""ENCODER_ARCHITECTURES: the architectures of encoders of text, by `general.architecture`; RERANKERS, the same with a
head that scores pairs.

RoBERTa and XLM-R are `bert`, too: the converter cuts off the positions before their first one. Activations have no key:
they are those of the published models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..architecture import Architecture, Fields, query_scalar, window
from ..metadata import Metadata

RANK = 4  # value of pooling_type: the head of the file scores a pair
TOKEN_TYPES = "token_types.weight"
POSITIONS = "position_embd.weight"
POST_NORMS = {"attention_output_norm": "attn_output_norm", "mlp_output_norm": "layer_output_norm"}


def num_token_types(data: Metadata) -> int:
    """Return the number of rows of the table, whose axis of one row a file may leave out."""
    if not data.has(TOKEN_TYPES):
        return 0
    return data.tensors[TOKEN_TYPES].num_elements // data.count("embedding_length", least=1)


def num_positions(data: Metadata) -> int:
    return data.shape_of(POSITIONS)[0]


def labels(data: Metadata) -> dict[str, str]:
    """Return id2label of a head; ConfigError if the file has no whole head."""
    missing = [name for name in ("cls.weight", "cls.output.weight") if not data.has(name)]
    if missing:
        data.refuse(
            f"{data.architecture}.pooling_type is {RANK}, but tensor {missing[0]} of the head is missing: take the "
            "model's safetensors"
        )
    count = data.tensors["cls.output.weight"].num_elements // data.count("embedding_length", least=1)
    named = data.whole("classifier.output_labels")
    if not isinstance(named, list) or len(named) != count:
        named = [f"LABEL_{number}" for number in range(count)]
    return {str(number): str(name) for number, name in enumerate(named)}


def is_reranker(data: Metadata) -> bool:
    return bool(data.get("pooling_type") == RANK)


BERT: Fields = {"type_vocab_size": num_token_types, "max_position_embeddings": num_positions}
MODERN: Fields = {
    "local_attention": window,
    "global_attn_every_n_layers": lambda data: data.count("attention.sliding_window_pattern", 3, least=1),
    "rope_local_base_freq": lambda data: data.number("rope.freq_base_swa", 10000.0),
}
GEMMA: Fields = {
    "use_bidirectional_attention": True,
    "sliding_window": window,
    "query_pre_attn_scalar": query_scalar(0),
    "rope_local_base_freq": lambda data: data.number("rope.freq_base_swa", 10000.0),
}

ENCODER_ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("BertModel", BERT, renamed=POST_NORMS),
    "gemma-embedding": Architecture("Gemma3TextModel", GEMMA, added=-1.0),
    "modern-bert": Architecture("ModernBertModel", MODERN),
    "nomic-bert": Architecture("NomicBertModel", {"type_vocab_size": num_token_types}, renamed=POST_NORMS),
}
RERANKERS: Mapping[str, tuple[tuple[Callable[[Metadata], object], Architecture], ...]] = {
    "bert": (
        (
            is_reranker,
            Architecture(
                "BertForSequenceClassification",
                {**BERT, "id2label": labels},
                renamed=POST_NORMS,
                of_head={"cls": "bert.pooler.dense", "cls.output": "classifier"},
            ),
        ),
    ),
}
