"""Compile what operations launch, in threads, instead of launching it: their tensors need no memory then.

Triton's compiler leaves Python's lock for most of its time, and ptxas is a process of its own.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.jit import JITFunction

_launch = JITFunction.run
_num_compiling = 0
_lock = threading.Lock()


def _launch_or_compile(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    is_compiling = active_mode.get() is not None  # of this thread
    return _launch(kernel, *arguments, grid=grid, warmup=warmup or is_compiling, **options)


@contextmanager
def compiling(executor: Executor) -> Iterator[AsyncCompileMode]:
    """What the calling thread launches inside is compiled by `executor`, and is there when this ends."""
    _count(1)
    try:
        with AsyncCompileMode(executor) as mode:
            yield mode
    finally:
        _count(-1)


def _count(change: int) -> None:
    """Launches cost nothing more once nobody compiles."""
    global _num_compiling
    with _lock:
        _num_compiling += change
        JITFunction.run = _launch_or_compile if _num_compiling else _launch
