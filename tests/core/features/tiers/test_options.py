"""The facts of blocks differ if the bytes of equal tokens may differ."""

from __future__ import annotations

from tokenloom.core.features.tiers.options import block_facts
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.version import numerics_digest
from tokenloom.tests.support.engine_specs import new_spec


def test_deterministic_engines_share_blocks_only_with_equal_kernels_of_equal_sources() -> None:
    spec = new_spec(config=EngineConfig(deterministic=True))
    assert block_facts(spec, "a") != block_facts(spec, "b")
    assert numerics_digest().encode() in block_facts(spec, "a")
    others = new_spec(config=EngineConfig())
    assert block_facts(others, "a") == block_facts(others, "b") != block_facts(spec, "a")
