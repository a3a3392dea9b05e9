"""Compile what operations launch, in threads, instead of launching it: their tensors need no memory then.

Triton's compiler leaves Python's lock for most of its time, and ptxas is a process of its own.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.jit import JITFunction

_launch = JITFunction.run


def _launch_or_compile(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    is_compiling = active_mode.get() is not None  # of this thread
    return _launch(kernel, *arguments, grid=grid, warmup=warmup or is_compiling, **options)


@contextmanager
def compiling(executor: Executor) -> Iterator[AsyncCompileMode]:
    """What the calling thread launches inside is compiled by `executor`, and is there when this ends."""
    JITFunction.run = _launch_or_compile
    with AsyncCompileMode(executor) as mode:
        yield mode
