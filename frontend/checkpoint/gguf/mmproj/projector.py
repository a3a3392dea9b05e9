"""Projector: how an mmproj file of one `clip.projector_type` becomes the encoder of a checkpoint, and the rules for it.

Such a GGUF file holds the encoder of a model's images or audio and the projector behind it. The keys and the names of
tensors are those of llama.cpp's gguf-py (MODEL_ARCH.MMPROJ); how its converter lays tensors out is a fact of each
family, proven by the embeddings of transformers in `tests/workers/encoders/test_mmproj.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .....ipc.spec.models.config_file import MAX_LAYERS
from ..metadata import Metadata

Fields: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Metadata], Fields]
Medium: TypeAlias = Literal["vision", "audio"]


@dataclass(frozen=True)
class Projector:
    """A family of models that take media, and how tensors of its mmproj files differ from its own.

    Modules are named without `.weight` and `.bias`, parameters by all of their name, and both without a layer's prefix.
    """

    architecture: str  # of config.json
    model_type: str  # of config.json
    medium: Medium
    texts: Mapping[str, str]  # general.architecture of the language model → model_type of text_config
    tokens: Mapping[str, tuple[str, ...]]  # field of config.json → texts of the token whose id it has, best first
    config: Rule  # further fields of config.json, those of the encoder among them
    processor: Rule  # the content of preprocessor_config.json
    output: tuple[str, int]  # tensor, and its axis that is as long as the language model's rows
    modules: Mapping[str, str]  # file's name of a module or parameter → name in the checkpoint
    layers: str  # prefix of layers in the checkpoint
    in_layer: Mapping[str, str]  # as `modules`, within a layer
    more_modules: Callable[[Metadata], Mapping[str, str]] = lambda data: {}  # those whose names depend on the file
    optional: tuple[str, ...] = ()  # of `modules` and `in_layer`, those that a file may lack
    unused: tuple[str, ...] = ()  # prefixes of tensors that the encoder does not need
    added: Mapping[str, float] = field(default_factory=dict)  # tensor → what is to be added to its elements
    is_rotated: bool = False  # in rows of query and key, the two rotary halves of a head alternate

    @property
    def prefix(self) -> str:
        """The prefix of layers in a file."""
        return "v.blk." if self.medium == "vision" else "a.blk."


def sizes(data: Metadata, medium: Medium) -> Fields:
    """Return an encoder's sizes by the names that most configs of transformers have for them. ConfigError if its heads
    have no pairs of elements to be rotated, or not all the same size."""
    hidden_size = data.count(f"{medium}.embedding_length", least=1)
    num_heads = data.count(f"{medium}.attention.head_count", least=1)
    if hidden_size % (2 * num_heads):
        data.refuse(f"clip.{medium}.embedding_length {hidden_size} has no even share for each of {num_heads} heads")
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(data, medium),
        "num_attention_heads": num_heads,
        "intermediate_size": inner_size(data, medium),
    }


def num_layers(data: Metadata, medium: Medium) -> int:
    return data.count(f"{medium}.block_count", most=MAX_LAYERS, least=1)


def inner_size(data: Metadata, medium: Medium) -> int:
    """Return the size between a layer's two matrices, by the first of them: converters have written other numbers as
    feed_forward_length."""
    hidden_size, prefix = data.count(f"{medium}.embedding_length", least=1), "v" if medium == "vision" else "a"
    shape = data.shape_of(f"{prefix}.blk.0.ffn_up.weight")
    return shape[0] if shape[-1] == hidden_size else shape[-1]


def image_sizes(data: Metadata) -> Fields:
    """Return the sizes of images and patches, in pixels."""
    return {"image_size": image_size(data), "patch_size": data.count("vision.patch_size", least=1)}


def image_size(data: Metadata) -> int:
    return data.count("vision.image_size", least=1)


def epsilon(data: Metadata, default: float) -> float:
    return data.number("vision.attention.layer_norm_epsilon", default)


def normalization(data: Metadata) -> Fields:
    """Return the numbers by which pixels are normalized. ConfigError unless there are three of each."""
    found = {f"image_{each}": data.whole(f"vision.image_{each}") for each in ("mean", "std")}
    for name, values in found.items():
        if not isinstance(values, list) or len(values) != 3:
            data.refuse(f"clip.vision.{name} must be 3 numbers, it is {values!r:.100}")
    return found


def square(data: Metadata) -> Fields:
    """Return the size of images that fill the encoder's square."""
    return {"height": image_size(data), "width": image_size(data)}
