"""Streams, events and graphs of the fake devices, and the choices of each thread.

Everything runs at its launch, so that streams order nothing. A graph holds launches as functions; during a capture of
its thread nothing of them runs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

Launches: TypeAlias = list[Callable[[], object]]

_ids = itertools.count(1)
_sync_debug_mode = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.stream: Stream | None = None
        self.launches: Launches | None = None  # of the graph that the thread captures


_thread = _Thread()


def current_device() -> int:
    return _thread.device


def choose_device(device: int) -> None:
    _thread.device = device


def capture() -> Launches | None:
    """Return the launches of the graph that this thread captures, if it does."""
    return _thread.launches


def host_waits(what: str) -> None:
    """Raise RuntimeError if the host must not wait for the device here."""
    if _thread.launches is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    if _sync_debug_mode == 2:
        raise RuntimeError(f"called a synchronizing CUDA operation ({what})")


def set_sync_debug_mode(mode: int | str) -> None:
    global _sync_debug_mode
    _sync_debug_mode = mode if isinstance(mode, int) else ("default", "warn", "error").index(mode)


class Stream:
    """A stream in name: launches run at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        from .tensors import full_device

        self.device = full_device("cuda" if device is None else device)
        self.priority = priority
        self.cuda_stream = self.stream_id = next(_ids)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        host_waits("Stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._before, _thread.stream = _thread.stream, self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.stream = self._before


_default = Stream.__new__(Stream)
_default.device, _default.priority, _default.cuda_stream, _default.stream_id = torch.device("cuda", 0), 0, 0, 0


def current_stream(device: Any = None) -> Stream:
    return _thread.stream or _default


def default_stream(device: Any = None) -> Stream:
    return _default


@contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


class Event:
    """A point in time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._has_time, self._time_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if _thread.launches is not None:
            host_waits("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        if not (self._has_time and end._has_time):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return max((end._time_s - self._time_s) * 1e3, 1e-3)


class CUDAGraph:
    """The launches of a capture."""

    def __init__(self) -> None:
        self._launches: Launches = []
        self._is_captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed"), capture_error_mode
        if _thread.launches is not None:
            raise RuntimeError("this thread captures another graph")
        if self._is_captured:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph: reset it first")
        _thread.launches = self._launches

    def capture_end(self) -> None:
        assert _thread.launches is self._launches
        _thread.launches, self._is_captured = None, True

    def replay(self) -> None:
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with torch.inference_mode():
            for launch in self._launches:
                launch()

    def reset(self) -> None:
        self._launches, self._is_captured = [], False


@contextmanager
def graph_context(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    synchronize()
    with stream or Stream():
        cuda_graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_ids))


def is_current_stream_capturing() -> bool:
    return _thread.launches is not None


def synchronize(device: Any = None) -> None:
    host_waits("synchronize")
