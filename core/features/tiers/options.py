"""OffloadOptions: the options of an engine's tiers, with the facts on which the bytes of a block depend."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ....ipc.messages.tier import STORE_ON_DISK, STORE_REMOTELY, CoreToTier
from ....ipc.process.arena import ArenaShape
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.models.model_config import ModelConfig
from ....ipc.version import numerics_digest
from ...kv.block_record import BlockRecord

FLOPS = {"cpu": 4e11, "cuda": 5e14}  # per second that a rank may reach; rather too many
# Version of a block's layout: [layers, 2, kv heads of the rank, tokens, head_dim], rank after rank; with several KV
# groups, the layers of the block's group.
FORMAT, GROUPED_FORMAT = 1, 2
# Fields that models and layers did not have when blocks were first stored, with the value that changes nothing. They
# count only with another value: otherwise no engine would find the blocks that an earlier version has stored.
LATER_FIELDS: dict[str, object] = {"has_output_gate": False, "state": None}
LATER_FIELDS_OF_LAYERS: dict[str, object] = {"mixer": "attention", "has_mlp": True}


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


def block_facts(spec: EngineSpec, kernels: str) -> bytes:
    """Return canonical JSON of all facts, except the weights, on which the bytes of a block depend. Engines with equal
    facts and weights can use each other's blocks. Under --deterministic the kernels and their sources count too, since
    other kernels give other bits. max_model_len counts if rotary embeddings depend on it."""
    config, groups = spec.config, spec.kv_groups
    facts: dict[str, object] = {
        "format": FORMAT if len(groups) == 1 else GROUPED_FORMAT,
        "model": _facts_of(spec.model),
        "dtype": spec.numbers,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
        "load_format": config.load_format,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": spec.max_model_len if spec.model.rope_depends_on_length else 0,
        "numerics": f"{spec.device} {kernels} {numerics_digest()}" if config.deterministic else "any",
    }
    if len(groups) > 1:
        facts["groups"] = [{"layers": group.layers, "window": group.window} for group in groups]
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def _facts_of(model: ModelConfig) -> dict[str, object]:
    facts = msgspec.to_builtins(model)
    for entry, later in ((facts, LATER_FIELDS), *((layer, LATER_FIELDS_OF_LAYERS) for layer in facts["layers"])):
        for name, value in later.items():
            if entry[name] == value:
                del entry[name]
    return dict(facts)
