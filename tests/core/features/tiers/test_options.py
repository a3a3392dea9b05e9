"""The facts of blocks differ if the bytes of equal tokens may differ."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenloom.core.features.tiers.options import block_facts
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import ROUNDINGS, quantized_on_load
from tokenloom.ipc.spec.models.config_file import ConfigFile
from tokenloom.ipc.spec.models.quantization_config import GGUF_ROUNDING, parse_quantization
from tokenloom.ipc.version import numerics_digest
from tokenloom.tests.support.engine_specs import new_spec


def test_deterministic_engines_share_blocks_only_with_equal_kernels_of_equal_sources() -> None:
    spec = new_spec(config=EngineConfig(deterministic=True))
    assert block_facts(spec, "a") != block_facts(spec, "b")
    assert numerics_digest().encode() in block_facts(spec, "a")
    others = new_spec(config=EngineConfig())
    assert block_facts(others, "a") == block_facts(others, "b") != block_facts(spec, "a")


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
