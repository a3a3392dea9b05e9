"""The check, before any process starts, that a model fits into this machine's memory on a CPU.

Compares an estimate with the memory that can be had, and looks for the options with which a model would fit. An engine
measures for itself; see workers/machine/memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.process.machine_memory import available_bytes, gib, swap_bytes
from ...ipc.processor import has_amx, has_avx2
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.option_ranges import AUTO_LENGTH
from ...ipc.spec.config.weight_files import StoredTensor, stored_tensors
from ...ipc.spec.models.model_config import ModelConfig
from .weight_memory import kv_bytes, weight_bytes

NUM_TOKENS = 2048  # of the request whose keys and values must fit, unless an option says how many
ENGINE_BYTES = 600 << 20  # of an engine's processes on a CPU, besides weights and KV cache

DType = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]


class Served(NamedTuple):
    """How an engine serves a model."""

    model: ModelConfig
    dtype: DType
    device: Device
    has_integer_products: bool


class Need(NamedTuple):
    """Memory that an engine on a CPU takes on this machine."""

    weights: int
    kv_cache: int
    what: str  # the KV cache is for
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.weights + self.kv_cache + ENGINE_BYTES

    def __str__(self) -> str:
        return (
            f"weights {gib(self.weights)} as {self.dtype}, KV cache of {self.what} {gib(self.kv_cache)}, "
            f"engine {gib(ENGINE_BYTES)}"
        )


def served_bytes(tensors: Mapping[str, StoredTensor], served: Served, config: EngineConfig) -> int:
    """Return the bytes of the weights, over all ranks."""
    is_cpu, stored = served.device == "cpu", served.model.quantization
    has_floats = stored is not None and stored.layout == "mxfp4"  # products with these are integers or floats
    has_blocks = is_cpu and served.dtype == "bfloat16" and has_avx2() and not config.enforce_reference
    may_unpack = has_amx() and config.cpu_isa in ("auto", "amx")
    return weight_bytes(
        tensors,
        served.model,
        served.dtype,
        keeps_codes=served.has_integer_products or not (is_cpu or has_floats),
        has_integer_products=served.has_integer_products,
        keeps_blocks=has_blocks,
        unpacks_blocks=has_blocks and may_unpack and not served.has_integer_products,
    )


def need_of(tensors: Mapping[str, StoredTensor], served: Served, config: EngineConfig, num_local: int) -> Need:
    """Return what an engine needs on this machine. num_local: its ranks here."""
    share = num_local / config.tensor_parallel_size
    weights = int(served_bytes(tensors, served, config) * share)
    name = f"{served.dtype}, products in integers" if served.has_integer_products else served.dtype
    if config.kv_cache_memory_bytes is not None and config.num_kv_blocks is None:
        return Need(weights, config.kv_cache_memory_bytes * num_local, "--kv-cache-memory-bytes", name)
    num_tokens = _num_tokens(config, served.model)
    cache = kv_bytes(served.model, served.dtype, num_tokens, is_8_bits=config.kv_cache_dtype != "auto")
    return Need(weights, int(cache * share), f"{num_tokens} tokens", name)


def check_memory(
    folder: Path, config: EngineConfig, serve: Callable[[EngineConfig], Served], num_local: int, shown: str
) -> None:
    """Raise ConfigError if a weight file is missing, truncated or unreadable or, on a CPU, if the model needs more than
    this machine's free memory and swap. `serve`: returns how a configuration serves the model, or raises ConfigError.
    `shown`: the model as the operator named it."""
    tensors, served = stored_tensors(folder), serve(config)
    if served.device != "cpu":
        return
    need, free_bytes = need_of(tensors, served, config, num_local), available_bytes() + swap_bytes()
    if need.num_bytes <= free_bytes:
        return
    fitting = [
        f"{option} takes {gib(found)}"
        for option, found in _others(tensors, config, serve, num_local)
        if found <= free_bytes
    ]
    mends = " or ".join(fitting) or "choose a smaller model"
    raise ConfigError(
        f"{shown} needs {gib(need.num_bytes)} of memory ({need}), {gib(free_bytes)} can be had here: {mends}, or free "
        "memory or raise the limit of its cgroup"
    )


def _num_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens that must find room in the KV cache."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * config.block_size
    if config.max_model_len in (None, AUTO_LENGTH):
        return min(NUM_TOKENS, model.max_position_embeddings)
    return config.max_model_len


def _others(
    tensors: Mapping[str, StoredTensor],
    config: EngineConfig,
    serve: Callable[[EngineConfig], Served],
    num_local: int,
) -> Iterator[tuple[str, int]]:
    """Yield options that would take less memory, and the bytes that the engine would need with them."""
    for option, changes in _options(config):
        try:
            other = msgspec.structs.replace(config, **changes)
            yield option, need_of(tensors, serve(other), other, num_local).num_bytes
        except ConfigError:  # the option does not suit the model
            continue


def _options(config: EngineConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    if config.quantized_products == "floats":
        yield "leaving out --quantized-products floats", {"quantized_products": "auto"}
    if config.dtype == "float32":
        yield "--dtype bfloat16", {"dtype": "bfloat16"}
    if config.quantization == "none":
        yield "--quantization int8", {"quantization": "int8", "dtype": "bfloat16"}
        yield "--quantization int4", {"quantization": "int4", "dtype": "bfloat16"}
    length = config.max_model_len
    if length not in (None, AUTO_LENGTH) and length > NUM_TOKENS and config.num_kv_blocks is None:
        yield f"--max-model-len {NUM_TOKENS}", {"max_model_len": NUM_TOKENS}
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        yield "a smaller KV cache", {"num_kv_blocks": None, "kv_cache_memory_bytes": None}
