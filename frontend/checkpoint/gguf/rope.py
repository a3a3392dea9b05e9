"""Conversion of the metadata of rotary embeddings to the fields of a config.json."""

from __future__ import annotations

from typing import Any

from .metadata import Metadata

ORIGINAL_LENGTH = "rope.scaling.original_context_length"


def rope_of(data: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the fields of the rotary embedding that all layers share. ConfigError if its scaling is not known."""
    rotary_dim = data.count("rope.dimension_count", head_dim)
    found: dict[str, Any] = {"rope_theta": data.number("rope.freq_base", 10000.0)}
    found["partial_rotary_factor"] = rotary_dim / max(head_dim, 1)
    scaling: dict[str, Any] = {}
    factor = data.known_number("rope.scaling.factor") or data.known_number("rope.scale_linear")
    original = None if data.get(ORIGINAL_LENGTH) is None else data.count(ORIGINAL_LENGTH)
    if data.has("rope_freqs.weight"):
        scaling = {"rope_type": "divided", "factors": data.floats("rope_freqs.weight")}
    elif data.has("rope_factors_long.weight"):
        names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
        scaling = {name: data.floats(tensor) for name, tensor in names.items()}
        scaling |= {"rope_type": "longrope", "attention_factor": data.number("rope.scaling.attn_factor", 1.0)}
        found["original_max_position_embeddings"] = original
    elif (kind := data.get("rope.scaling.type", "linear")) == "yarn" and factor:
        named = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        given = {ours: data.known_number(f"rope.scaling.yarn_{theirs}") for ours, theirs in named.items()}
        if (multiplier := data.known_number("rope.scaling.yarn_log_multiplier")) is not None:
            given |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **given}
        scaling = {name: value for name, value in scaling.items() if value is not None}
    elif kind == "linear" and factor:
        scaling = {"rope_type": kind, "factor": factor}
    elif kind not in ("linear", "none"):
        keys = f"{data.architecture}.rope.scaling.type, {data.architecture}.rope.scaling.factor {factor}"
        data.refuse(f"rope scaling {kind!r:.100} is not supported ({keys})")
    elif rotary_dim < head_dim:  # gives the partial rotation to families that read no partial_rotary_factor, too
        scaling = {"rope_type": "divided", "factors": [1.0] * (int(rotary_dim) // 2)}
    if scaling:
        found["rope_scaling"] = scaling
    return found
