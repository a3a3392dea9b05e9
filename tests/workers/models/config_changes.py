"""Changes of single fields of a config.json, each to another value that a published model might have.

    for change in changes(config):
        write(changed(config, change))

Values that transformers itself does not take are among them: who uses this asks transformers first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenloom.tests.support.families import Config

FULL, SLIDING = "full_attention", "sliding_attention"
NO_SHAPE = {  # fields that describe the file, or the use of the model by a program
    *("architectures", "model_type", "transformers_version", "dtype", "id2label", "label2id", "problem_type"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("vision_config", "audio_config"),
}
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "n_embd", "n_layer"}  # large by default
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: tuple[Config, ...] = (
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7},
    {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "attention_factor": 1.3},
)


class Missing:
    """The value of a field that is left out."""

    def __repr__(self) -> str:
        return "left out"


MISSING = Missing()


class Change(NamedTuple):
    """Another value of the field at `path`, of objects in objects."""

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} = {self.value!r}"


def changed(config: Config, change: Change) -> Config:
    """Return a copy of the config with the change."""
    found = copy.deepcopy(config)
    place = found
    for name in change.path[:-1]:
        place = place.setdefault(name, {})
    if change.value is MISSING:
        del place[change.path[-1]]
    else:
        place[change.path[-1]] = change.value
    return found


def changes(config: Config, at: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield the changes of each field, also of nested objects."""
    for name, value in config.items():
        path = (*at, name)
        if name in NO_SHAPE:
            continue
        if isinstance(value, dict):
            yield from changes(value, path)
            if (name == "rope_parameters" and "rope_theta" in value) or name in (FULL, SLIDING):
                yield from (Change(path, {"rope_theta": value.get("rope_theta"), **rope}) for rope in ROPES)
                yield Change(path, {**value, "partial_rotary_factor": 0.5})
        else:
            yield from (Change(path, other) for other in _others(name, value))


def left_out(config: Config, at: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield the changes that leave out one field, so that its default acts."""
    for name, value in config.items():
        if name in NO_SHAPE | SIZES:
            continue
        yield Change((*at, name), MISSING)
        if name == "text_config":
            yield from left_out(value, (*at, name))


def _others(name: str, value: object) -> list[Any]:
    found: list[Any] = []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found = [each for each in (value + 1, value * 2, value // 2, 1) if each > 0]
    elif isinstance(value, float):
        found = [value * 2 + 0.25, value / 2]
    elif isinstance(value, str):
        found = list(ACTIVATIONS) if "act" in name else []
    elif isinstance(value, list) and name == "layer_types":
        turns = [(FULL, SLIDING)[layer % 2] for layer in range(len(value))]
        found = [[FULL] * len(value), [SLIDING] * len(value), turns, turns[::-1]]
    elif isinstance(value, list) and value:
        found = [value[::-1], value[:1] * len(value)]
    elif value is None:
        found = [True, 1, 2, 8, 0.5, "all"]
    return [each for each in found if each != value]


def aliases(config: Config, names: Mapping[str, str]) -> Iterator[Config]:
    """Yield copies in which one field has its other name of transformers' attribute_map."""
    for other, name in names.items():
        if name in config and other not in config:
            yield {other if each == name else each: value for each, value in config.items()}
