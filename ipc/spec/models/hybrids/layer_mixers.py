"""Rules for layers of which some attend and others keep a state."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_file import ConfigFile
from ..model_config import LayerConfig
from ..model_fields import listed_kinds

OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # names in files before transformers 5


def layer_kinds(file: ConfigFile, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the kind of each layer; see listed_kinds."""
    return listed_kinds(file, known, default, OLD_KINDS)


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
