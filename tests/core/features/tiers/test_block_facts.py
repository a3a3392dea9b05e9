"""The facts of blocks differ if the bytes of equal tokens may differ, and stay the same over versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec

from tokenloom.core.features.tiers.block_facts import FIRST_FIELDS, block_facts, default_of, is_later
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import ROUNDINGS, quantized_on_load
from tokenloom.ipc.spec.models.config_file import ConfigFile
from tokenloom.ipc.spec.models.model_config import LayerConfig
from tokenloom.ipc.spec.models.quantization_config import GGUF_ROUNDING, parse_quantization
from tokenloom.ipc.version import numerics_digest
from tokenloom.tests.support.engine_specs import new_spec


def test_deterministic_engines_share_blocks_only_with_equal_kernels_of_equal_sources() -> None:
    spec = new_spec(config=EngineConfig(deterministic=True))
    assert block_facts(spec, "a") != block_facts(spec, "b")
    assert numerics_digest().encode() in block_facts(spec, "a")
    others = new_spec(config=EngineConfig())
    assert block_facts(others, "a") == block_facts(others, "b") != block_facts(spec, "a")


def test_a_model_with_one_group_keeps_the_facts_under_which_its_blocks_are_stored() -> None:
    facts = block_facts(new_spec(), "any")
    assert hashlib.sha256(facts).hexdigest() == "eb23033f491a759b21a1aa13eef85f6cc89f3026265eafd806f778329a0caa0c", (
        "no engine finds the blocks that earlier versions have stored"
    )


def test_fields_that_models_got_later_have_a_default_and_count_only_with_another_value() -> None:
    spec = new_spec()
    (layer,) = spec.model.layers
    models = [
        spec.model,
        msgspec.structs.replace(spec.model, has_output_gate=True),
        msgspec.structs.replace(spec.model, layers=[msgspec.structs.replace(layer, has_mlp=False)]),
        msgspec.structs.replace(spec.model, names=msgspec.structs.replace(spec.model.names, expert_list="e")),
    ]
    assert len({block_facts(msgspec.structs.replace(spec, model=each), "any") for each in models}) == len(models)
    configs = dict[str, type[msgspec.Struct]]()
    for config in configs_of(type(spec.model)):
        configs[config.__name__] = config
    assert configs.keys() >= FIRST_FIELDS.keys()
    for config in configs.values():
        for field in msgspec.structs.fields(config):
            assert not is_later(config, field.name) or default_of(field) is not msgspec.NODEFAULT, (
                f"{config.__name__}.{field.name} has no default: no engine would find the blocks stored before"
            )


def configs_of(config: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Yield the type and those of all structs in its fields."""
    yield config
    for field in msgspec.structs.fields(config):
        for part in parts_of(field.type):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from configs_of(part)


def parts_of(kind: object) -> Iterator[object]:
    """Yield a type and the types within it, as of a list's items."""
    yield kind
    for part in get_args(kind):
        yield from parts_of(part)


def test_the_groups_of_a_model_with_several_are_facts() -> None:
    """Blocks of a model with several groups have the layers of one group, not of all."""
    layers = [LayerConfig(window=window) for window in (None, 8, 8)]
    spec = new_spec()
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, layers=layers, num_layers=3))
    facts = json.loads(block_facts(spec, "any"))
    assert len(spec.kv_groups) == 2
    assert facts["format"] == 2
    assert facts["groups"] == [
        {"layers": [0], "window": None, "is_state": False},
        {"layers": [1, 2], "window": 8, "is_state": False},
    ]


def test_weights_that_are_rounded_in_another_way_give_other_blocks() -> None:
    spec = new_spec()
    stored = parse_quantization(ConfigFile(Path("config.json"), {"quantization_config": {"quant_method": "gguf"}}))
    assert stored is not None and stored.rounding == GGUF_ROUNDING
    of_file = msgspec.structs.replace(spec.model, quantization=stored)
    for model, rounding in ((quantized_on_load(spec.model, "int4"), ROUNDINGS["int4"]), (of_file, GGUF_ROUNDING)):
        assert model.quantization is not None and model.quantization.rounding == rounding
        before = msgspec.structs.replace(model.quantization, rounding=rounding - 1)
        models = (model, msgspec.structs.replace(model, quantization=before))
        now, then = (block_facts(msgspec.structs.replace(spec, model=each), "any") for each in models)
        assert now != then
