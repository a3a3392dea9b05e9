"""The functions of torch.cuda and torch.distributed on the fake devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import memory, streams

NAME = "fake CUDA device"
CAPABILITY = (9, 0)
PROPERTIES = {
    "name": NAME,
    "total_memory": memory.TOTAL_BYTES,
    "multi_processor_count": 132,
}


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return streams.current_device() if index is None else index


class _CudaRuntime:
    """Calls of the CUDA runtime."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        memory.register(address, num_bytes)
        return 0


@contextmanager
def _device_context(device: Any) -> Iterator[None]:
    before = streams.current_device()
    streams.choose_device(_index(device))
    try:
        yield
    finally:
        streams.choose_device(before)


def install(num_devices: int) -> None:
    def set_device(device: Any) -> None:
        index = _index(device)
        if not 0 <= index < num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}, {num_devices} are faked")
        streams.choose_device(index)

    changes: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: num_devices,
        "current_device": streams.current_device,
        "set_device": set_device,
        "device": _device_context,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: SimpleNamespace(**PROPERTIES),
        "mem_get_info": lambda device=None: (memory.free_bytes(_index(device)), memory.TOTAL_BYTES),
        "memory_allocated": lambda device=None: memory.used_bytes(_index(device)),
        "max_memory_allocated": lambda device=None: memory.peak_bytes(_index(device)),
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(_index(device)),
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": streams.synchronize,
        "set_sync_debug_mode": streams.set_sync_debug_mode,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream_context,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "CUDAGraph": streams.CUDAGraph,
        "graph": streams.graph_context,
        "graph_pool_handle": streams.graph_pool_handle,
        "is_current_stream_capturing": streams.is_current_stream_capturing,
        "cudart": _CudaRuntime,
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "0.0 (fake)"
    join = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        join("gloo" if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group
