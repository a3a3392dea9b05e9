"""Each field of StateConfig, and of layers with a state, acts: another value changes the logits or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import LayerConfig, ModelConfig, NormConfig, StateConfig
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_hybrids import SHORT, Case, load

VISIBLE = 1e-4  # of the largest logit
OTHERS: dict[str, Callable[[Any], Any]] = {  # of each field of StateConfig: another value
    "kind": lambda kind: "mamba2" if kind == "gated_delta" else "gated_delta",
    "num_heads": lambda count: count * 2,
    "key_heads": lambda count: count * 2 or 1,
    "key_dim": lambda size: size * 2 or 16,
    "value_dim": lambda size: size * 2,
    "conv_size": lambda size: size + 1,
    "conv_parts": lambda parts: parts[::-1] if len(parts) > 1 else "u",
    "has_conv_activation": lambda flag: not flag,
    "has_conv_bias": lambda flag: not flag,
    "has_projection_bias": lambda flag: not flag,
    "has_output_bias": lambda flag: not flag,
    "beta_scale": lambda scale: scale * 1.5,
    "min_dt": lambda limit: limit + 0.5,
    "max_dt": lambda limit: 0.3,
    "gate": lambda gate: "norm_then_silu" if gate == "silu_then_norm" else "silu_then_norm",
    "norm": lambda norm: NormConfig(eps=1e-6) if norm is None else msgspec.structs.replace(norm, eps=1.0),
    "norm_groups": lambda count: count * 2,
    "has_skip": lambda flag: not flag,
    "input_scale": lambda scale: scale * 1.5,
    "output_scale": lambda scale: scale * 1.5,
    "part_scales": lambda scales: {**scales, "v": 1.5},
    "projections": lambda tensors: rotated(tensors),
    "are_key_heads_tiled": lambda flag: not flag,
    "by_key_head": lambda names: () if names else ("in_proj", "in_proj_qkv"),
    "names": lambda names: msgspec.structs.replace(names, conv="other"),
}
MAMBA_ALONE = {"min_dt", "max_dt", "norm_groups", "has_skip"}
SCAN_ALONE = {"beta_scale", "gate", "norm", *MAMBA_ALONE}
UNUSED = {
    "gated_delta": MAMBA_ALONE,
    "mamba2": {"beta_scale"},
    "conv": {*SCAN_ALONE, "key_heads", "key_dim", "by_key_head", "are_key_heads_tiled"},
}
FAMILIES = ("qwen3_next", "olmo_hybrid", "bamba", "falcon_h1_scaled", "lfm2")


def test_every_field_has_another_value() -> None:
    assert OTHERS.keys() == set(StateConfig.__struct_fields__)


def rotated(tensors: dict[str, str]) -> dict[str, str]:
    """Return the tensors with the letters of their parts moved on by one."""
    letters = "".join(tensors.values())
    moved = iter(letters[1:] + letters[0])
    return {name: "".join(next(moved) for _ in parts) for name, parts in tensors.items()}


def changes(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the config with one field after the other changed, by the field."""
    state = config.state
    assert state is not None
    fields = OTHERS.keys() - UNUSED[state.kind]
    if max(map(len, state.projections.values())) == 1:
        fields -= {"by_key_head"}  # it is an order of the parts of one tensor
    if state.num_heads == state.key_heads or state.key_heads == 1:
        fields -= {"are_key_heads_tiled"}  # both orders are one
    if "{part}" in state.names.conv:
        fields -= {"conv_parts"}  # in another order they have the same weights
    changed = {name: msgspec.structs.replace(state, **{name: OTHERS[name](getattr(state, name))}) for name in fields}
    return {name: msgspec.structs.replace(config, state=each) for name, each in changed.items()}


def model_changes(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the config with a field of its own or of a layer changed, by the field; only those that hybrids alone
    have."""
    found = {"has_output_gate": msgspec.structs.replace(config, has_output_gate=not config.has_output_gate)}
    for name in ("attention_input_scale", "attention_output_scale", "gate_scale", "mlp_output_scale"):
        found[name] = msgspec.structs.replace(config, **{name: 1.5 * getattr(config, name)})
    for index, own in enumerate(config.layers):
        mixer = "state" if own.mixer in ("attention", "both") else "attention"
        others = {"mixer": mixer, "has_mlp": not own.has_mlp}
        for field, value in others.items():
            layer = msgspec.structs.replace(own, **{field: value})
            layers: list[LayerConfig] = [*config.layers[:index], layer, *config.layers[index + 1 :]]
            found[f"layers[{index}].{field}"] = msgspec.structs.replace(config, layers=layers)
    return found


def is_seen(case: Case, config: ModelConfig) -> bool:
    """Return whether a config is refused, or gives other logits than transformers."""
    try:
        return case.error([SHORT], load(case.folder, config)) > VISIBLE
    except (ConfigError, AssertionError, RuntimeError, ArithmeticError, LookupError):
        return True


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_each_field_of_the_state_acts(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family, SHORT)
    assert not is_seen(case, case.config) and load(case.folder, case.config).is_fused
    assert [name for name, config in changes(case.config).items() if not is_seen(case, config)] == []


@pytest.mark.parametrize("family", some(("qwen3_5", "falcon_h1_scaled", "nemotron_h"), 1))
def test_each_field_of_the_layers_acts(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family, SHORT)
    unused = {"gate_scale"} if not case.config.activation.is_gated else set()
    assert load(case.folder, case.config).is_fused
    changed = model_changes(case.config)
    assert {name for name, config in changed.items() if not is_seen(case, config)} <= unused
