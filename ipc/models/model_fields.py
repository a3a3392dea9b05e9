"""Parsers of config.json's fields into fields of ModelConfig: rotary embeddings, layers, experts.

Both spellings of rotary embeddings are read: transformers 5's `rope_parameters`, which may have an entry for each type
of layer, and the older `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from .config_file import ConfigFile
from .model_config import ExpertsConfig, LayerConfig, RopeConfig, RopeKind

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = get_args(RopeKind)


def head_dim(file: ConfigFile, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in file:
        size = file.positive("head_dim")
    elif hidden_size % num_heads:
        file.refuse(f"hidden_size {hidden_size} does not divide into {num_heads} attention heads")
    else:
        size = hidden_size // num_heads
    if size % 2:
        file.refuse(f"head_dim {size} is odd, rotary embeddings need pairs")
    return size


def rope_of(file: ConfigFile, head_dim: int, *, is_paired: bool = False, part: float | None = None) -> RopeConfig:
    """Parse the rotary embedding that all layers share. `part`: rotated part of a head if no field says it; None: whole
    heads turn, and the type default has no such field."""
    parameters = dict(file.get("rope_scaling") or file.get("rope_parameters") or {})
    for name, value in parameters.items():
        if isinstance(value, dict):
            file.refuse(f"rope parameters of their own for {name} layers are not supported")
    theta = _theta(file, parameters, file.number("rope_theta", 10000.0) or 10000.0)
    return _rope(file, parameters, theta, head_dim, is_paired, part)


def ropes_by_kind(
    file: ConfigFile, head_dim: int, local_theta: float, full_head_dim: int | None = None
) -> list[RopeConfig]:
    """Parse a rotary embedding for each of the kinds FULL and SLIDING: entries of rope_parameters, or the older
    rope_theta with rope_scaling for full layers and `rope_local_base_freq` for sliding ones. `full_head_dim`: of full
    layers, if it is another."""
    entries = file.get("rope_parameters") or {}
    found = []
    for kind in (FULL, SLIDING):
        if isinstance(entries.get(kind), dict):
            parameters = dict(entries[kind])
            theta = _theta(file, parameters, 10000.0)
            parameters.pop("truncate", None)  # which transformers does not read of a kind
        elif kind == SLIDING:
            parameters, theta = {}, file.number("rope_local_base_freq", local_theta)
        else:
            parameters = dict(file.get("rope_scaling") or entries)
            theta = _theta(file, parameters, file.number("rope_theta", 10000.0))
        size = head_dim if kind == SLIDING else full_head_dim or head_dim
        found.append(_rope(file, parameters, theta, size, False, None))
    return found


def _theta(file: ConfigFile, parameters: dict[str, Any], default: float) -> float:
    """Remove and return the base of the rotary angles."""
    return ConfigFile(file.path, {"rope_theta": parameters.pop("rope_theta", None)}).number("rope_theta", 0) or default


def _rope(
    file: ConfigFile,
    parameters: dict[str, Any],
    theta: float,
    head_dim: int,
    is_paired: bool,
    default_part: float | None,
) -> RopeConfig:
    for name, value in parameters.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, float) and not math.isfinite(each):
                file.refuse(f"{name} of the rotary embedding must be a number, it is {each}")
    old_kind = parameters.pop("type", None)
    kind: Any = parameters.pop("rope_type", None) or old_kind or "default"
    if kind == "su":
        kind = "longrope"  # Phi-3's first name for it
    if kind not in ROPE_KINDS:
        file.refuse(f"rope type {kind} is not supported, known are {', '.join(ROPE_KINDS)}")
    part = parameters.pop("partial_rotary_factor", None) or file.number("partial_rotary_factor", default_part or 1.0)
    if default_part is None and (kind == "default" or "alpha" in parameters):
        part = 1.0
    if not 0 < part <= 1:
        file.refuse(f"partial_rotary_factor {part} is outside (0, 1]")
    if default_part is None and part != 1 and kind not in ("proportional", "divided"):
        file.refuse(f"partial_rotary_factor {part} with rope type {kind} is not supported: heads turn as a whole")
    original_length = file.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope") and original_length is not None:
        parameters["original_max_position_embeddings"] = original_length
    rotary_dim = int(head_dim * part) if kind != "proportional" else head_dim
    if kind == "proportional":
        parameters["partial_rotary_factor"] = part
    if rotary_dim % 2:
        file.refuse(f"partial_rotary_factor {part} of head_dim {head_dim} is the odd number {rotary_dim}")
    return RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, is_paired=is_paired, parameters=parameters)


def layer_kinds(file: ConfigFile, period: int = 0) -> list[str]:
    """Return FULL or SLIDING for each layer: the field layer_types, or full attention in each `period`-th layer; period
    0: in all."""
    num_layers = file.positive("num_hidden_layers")
    kinds = file.get("layer_types")
    if kinds is None:
        return [SLIDING if period and (layer + 1) % period else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers:
        file.refuse(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            file.refuse(f"layer type {kind} is not supported, known are {FULL} and {SLIDING}")
    return list(kinds)


def layers_of(
    kinds: Sequence[str], window: int | None, rope_of_kind: Callable[[int, str], int | None] = lambda layer, kind: 0
) -> list[LayerConfig]:
    """Return the layers: sliding ones have the window; `rope_of_kind` gives the index of a layer's rotary embedding."""
    return [
        LayerConfig(window=window if kind == SLIDING else None, rope=rope_of_kind(layer, kind))
        for layer, kind in enumerate(kinds)
    ]


def window_of(file: ConfigFile) -> int | None:
    return file.positive("sliding_window") if "sliding_window" in file else None


def experts_of(file: ConfigFile, size_name: str, **more: Any) -> ExpertsConfig:
    """Parse the common fields of experts. size_name: the field with an expert's intermediate size."""
    name = "num_local_experts" if "num_local_experts" in file else "num_experts"
    if "n_routed_experts" in file:
        name = "n_routed_experts"
    num_experts, top_k = file.positive(name), file.positive("num_experts_per_tok")
    if top_k > num_experts:
        file.refuse(f"num_experts_per_tok {top_k} is above {name} {num_experts}")
    fields = {"is_normalized": file.flag("norm_topk_prob"), **more}
    return ExpertsConfig(num_experts=num_experts, top_k=top_k, intermediate_size=file.positive(size_name), **fields)
