"""Parsers of config.json's fields into fields of ModelConfig: rotary embeddings, layers, experts.

Both spellings of rotary embeddings are read: transformers 5's `rope_parameters`, which may have an entry for each type
of layer, and the older `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from .config_file import ConfigFile, shown
from .model_config import ExpertsConfig, LayerConfig, RopeConfig, RopeKind

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = get_args(RopeKind)
ORIGINAL_LENGTH = "original_max_position_embeddings"
PARAMETERS: dict[str, Callable[[ConfigFile, str], Any]] = {  # fields that formulas of rotary embeddings use
    **dict.fromkeys(("factor", ORIGINAL_LENGTH, "beta_fast", "beta_slow", "alpha"), ConfigFile.above_zero),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ConfigFile.number),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), ConfigFile.number),
    **dict.fromkeys(("short_factor", "long_factor", "factors"), ConfigFile.numbers),
    "truncate": ConfigFile.flag,
}


def head_dim(file: ConfigFile, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in file:
        size = file.positive("head_dim")
    elif hidden_size % num_heads:
        file.refuse(
            f"{file.spelled('hidden_size')} {hidden_size} does not divide into {num_heads} attention heads "
            f"({file.spelled('num_attention_heads')})"
        )
    else:
        size = hidden_size // num_heads
    if size % 2:
        file.refuse(f"{head_dim_name(file)} {size} is odd, rotary embeddings need pairs")
    return size


def head_dim_name(file: ConfigFile) -> str:
    """Return, for messages, the field with the size of heads, or the formula of fields from which it follows."""
    names = " / ".join(map(file.spelled, ("hidden_size", "num_attention_heads")))
    return file.spelled("head_dim") if "head_dim" in file else f"head_dim ({names})"


def rope_field(file: ConfigFile) -> str:
    """Return the name of the field that holds the parameters of rotary embeddings."""
    return "rope_scaling" if file.part("rope_scaling").fields() else "rope_parameters"


def rope_of(file: ConfigFile, head_dim: int, *, is_paired: bool = False, part: float | None = None) -> RopeConfig:
    """Parse the rotary embedding that all layers share. `part`: rotated share of a head if no field states it; None:
    whole heads are rotated, and with the type default partial_rotary_factor is ignored."""
    parameters = file.part(rope_field(file))
    for name, value in parameters.fields().items():
        if isinstance(value, dict):
            file.refuse(f"rope parameters of their own for {name:.100} layers are not supported")
    theta = parameters.number("rope_theta") or file.number("rope_theta") or 10000.0
    return _rope(file, parameters, theta, head_dim, is_paired, part)


def ropes_by_kind(
    file: ConfigFile, head_dim: int, local_theta: float, full_head_dim: int | None = None
) -> list[RopeConfig]:
    """Parse a rotary embedding for each of the kinds FULL and SLIDING: entries of rope_parameters, or the older
    rope_theta with rope_scaling for full layers and `rope_local_base_freq` for sliding ones. `full_head_dim`: the head
    size of full layers, if it differs from `head_dim`."""
    entries = file.part("rope_parameters")
    found = []
    for kind in (FULL, SLIDING):
        is_full = kind == FULL
        theta = file.number("rope_theta", 10000.0) if is_full else file.above_zero("rope_local_base_freq", local_theta)
        if isinstance(entries.get(kind), dict):
            parameters = entries.part(kind).with_fields({"truncate": None})  # which transformers ignores here
        else:
            parameters = file.part(rope_field(file)) if is_full else ConfigFile(file.path, {})
        theta = parameters.number("rope_theta") or theta
        size = (full_head_dim or head_dim) if is_full else head_dim
        found.append(_rope(file, parameters, theta, size, False, None))
    return found


def _rope(
    file: ConfigFile,
    parameters: ConfigFile,
    theta: float,
    head_dim: int,
    is_paired: bool,
    default_part: float | None,
) -> RopeConfig:
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "su":
        kind = "longrope"  # Phi-3's first name for it
    if kind not in ROPE_KINDS:
        file.refuse(f"rope type {kind!s:.100} is not supported, known are {', '.join(ROPE_KINDS)}")
    if theta <= (kind == "yarn"):  # yarn divides by its logarithm
        file.refuse(f"{file.spelled('rope_theta')} {theta} is too small for rope type {kind}")
    name = file.spelled("partial_rotary_factor")
    part = parameters.number("partial_rotary_factor") or file.number("partial_rotary_factor", default_part or 1.0)
    if default_part is None and (kind == "default" or "alpha" in parameters):
        part = 1.0
    if not 0 < part <= 1:
        file.refuse(f"{name} {part} is outside (0, 1]")
    if default_part is None and part != 1 and kind not in ("proportional", "divided"):
        file.refuse(f"{name} {part} with rope type {kind} is not supported: heads turn as a whole")
    rotary_dim = int(head_dim * part) if kind != "proportional" else head_dim
    if rotary_dim % 2:
        file.refuse(f"{name} {part} of head_dim {head_dim} is the odd number {rotary_dim}")
    if kind == "dynamic" and rotary_dim == 2:
        file.refuse(f"head_dim {head_dim} is too small for rope type {kind}")
    known = {name: read(parameters, name) for name, read in PARAMETERS.items() if name in parameters}
    if kind in ("llama3", "yarn", "longrope") and ORIGINAL_LENGTH in file:
        known[ORIGINAL_LENGTH] = file.above_zero(ORIGINAL_LENGTH)
    if known.get(ORIGINAL_LENGTH) == 1:  # longrope divides by its logarithm
        file.refuse(f"{ORIGINAL_LENGTH} 1 is too small for rope type {kind}")
    if kind == "proportional":
        known["partial_rotary_factor"] = part
    return RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, is_paired=is_paired, parameters=known)


def layer_kinds(file: ConfigFile, period: int = 0) -> list[str]:
    """Return FULL or SLIDING for each layer, from layer_types or, without that field, FULL in every `period`-th layer
    (0: in all)."""
    num_layers = file.positive("num_hidden_layers")
    default = [SLIDING if period and (layer + 1) % period else FULL for layer in range(num_layers)]
    return listed_kinds(file, (FULL, SLIDING), default, {})


def listed_kinds(file: ConfigFile, known: Sequence[str], default: Sequence[str], old: Mapping[str, str]) -> list[str]:
    """Return the kind of each layer from layer_types, or `default` without that field. ConfigError if the field has
    another length than there are layers, or a kind that is not one of `known`. old: known kinds by their former
    names."""
    kinds, num_layers = file.get("layer_types"), file.positive("num_hidden_layers")
    if kinds is None:
        return list(default)
    if not isinstance(kinds, list):
        file.refuse(f"layer_types must be a list with the type of each layer, it is {shown(kinds)}")
    if len(kinds) != num_layers:
        file.refuse(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    kinds = [old.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in known:
            file.refuse(f"layer type {kind!s:.100} of layer_types is not supported, known are {' and '.join(known)}")
    return kinds


def layers_of(
    kinds: Sequence[str], window: int | None, rope_of_kind: Callable[[int, str], int | None] = lambda layer, kind: 0
) -> list[LayerConfig]:
    """Return the layers; sliding ones have the window. `rope_of_kind`: returns the index of a layer's rotary embedding,
    None for no positions, from the layer's number and kind."""
    return [
        LayerConfig(window=window if kind == SLIDING else None, rope=rope_of_kind(layer, kind))
        for layer, kind in enumerate(kinds)
    ]


def window_of(file: ConfigFile) -> int | None:
    return file.positive("sliding_window") if "sliding_window" in file else None


def experts_of(file: ConfigFile, size_name: str, **more: Any) -> ExpertsConfig:
    """Parse the common fields of experts. `size_name`: the field with an expert's intermediate size; `more`: fields of
    ExpertsConfig."""
    name = "num_local_experts" if "num_local_experts" in file else "num_experts"
    if "n_routed_experts" in file:
        name = "n_routed_experts"
    num_experts, top_k = file.positive(name), file.positive("num_experts_per_tok")
    if top_k > num_experts:
        file.refuse(f"{file.spelled('num_experts_per_tok')} {top_k} is above {file.spelled(name)} {num_experts}")
    fields = {"is_normalized": file.flag("norm_topk_prob"), **more}
    return ExpertsConfig(num_experts=num_experts, top_k=top_k, intermediate_size=file.positive(size_name), **fields)
