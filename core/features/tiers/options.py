"""OffloadOptions: the options of an engine's tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ....ipc.messages.tier import STORE_ON_DISK, STORE_REMOTELY, CoreToTier
from ....ipc.process.arena import ArenaShape
from ....ipc.spec.config.engine_spec import EngineSpec
from ...kv.block_record import BlockRecord
from .block_facts import block_facts

FLOPS = {"cpu": 4e11, "cuda": 5e14}  # per second that a rank may reach; rather too many


class OffloadOptions(NamedTuple):
    """The options of an engine's tiers."""

    arena: ArenaShape
    block_size: int
    device: str
    facts: bytes  # as in OpenTier
    token_s: float  # seconds to compute a token of a prompt, until steps were measured
    is_host_tier: bool
    sources: int = 0  # bits of the targets to write to that are configured
    has_sources: bool = False  # there are sources to load from
    uses_process: bool = True  # there are sources, or peers that load from this engine
    writes_salted_remotely: bool = True
    quota: float = 1.0


class Tiers(NamedTuple):
    """Places for KV blocks outside the pool, and the tier process that serves them."""

    options: OffloadOptions
    send: Callable[[CoreToTier], None]
    record: BlockRecord | None = None  # file with the content of the slots
    clock: Callable[[], float] = time.monotonic


def options_of(spec: EngineSpec, arena: ArenaShape, kernels: str) -> OffloadOptions:
    """Return the options for this engine's tiers. kernels: their name, as workers report it."""
    config = spec.config
    targets = (STORE_ON_DISK if config.kv_disk else 0) | (STORE_REMOTELY if config.kv_remote else 0)
    has_sources = any((config.kv_disk, config.kv_remote, config.kv_peers))
    return OffloadOptions(
        arena=arena,
        block_size=config.block_size,
        device=spec.device,
        facts=block_facts(spec, kernels),
        token_s=2 * spec.model.num_layer_weights / (FLOPS[spec.device] * config.tensor_parallel_size),
        is_host_tier=config.kv_host_bytes is not None,
        sources=targets,
        has_sources=has_sources,
        uses_process=has_sources or config.kv_listen is not None,
        writes_salted_remotely=config.kv_remote_salted,
        quota=config.kv_quota,
    )
