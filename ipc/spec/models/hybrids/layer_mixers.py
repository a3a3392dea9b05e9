"""Rules for layers of which some attend and others keep a state."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_file import ConfigFile, shown
from ..model_config import LayerConfig

OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # names in files before transformers 5


def layer_kinds(file: ConfigFile, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the kind of each layer from layer_types, or `default` without that field. ConfigError if the field has
    another length than there are layers, or a kind that is not one of `known`."""
    kinds, num_layers = file.get("layer_types"), file.positive("num_hidden_layers")
    if kinds is None:
        return list(default)
    if not isinstance(kinds, list):
        file.refuse(f"layer_types must be a list with the type of each layer, it is {shown(kinds)}")
    if len(kinds) != num_layers:
        file.refuse(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    kinds = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in known:
            file.refuse(f"layer type {kind!s:.100} of layer_types is not supported, known are {', '.join(known)}")
    return kinds


def mixed_layers(kinds: Sequence[str], first_expert: int | None = None) -> list[LayerConfig]:
    """Return the layers: those of kind full_attention attend, the others keep a state. Layers from `first_expert` on
    have experts; None: no layer has."""
    return [
        LayerConfig(
            mixer="attention" if kind == "full_attention" else "state",
            has_experts=first_expert is not None and layer >= first_expert,
        )
        for layer, kind in enumerate(kinds)
    ]
