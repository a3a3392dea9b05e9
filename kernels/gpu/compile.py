"""Compile what operations launch instead of launching it: their tensors need no memory then.

In threads, where triton has what it takes: its compiler leaves Python's lock for most of its time, and ptxas is a
process of its own. That part of triton is private; without it kernels are compiled one after the other.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from triton.runtime.jit import JITFunction

from .launch import launch

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:
    AsyncCompileMode = None

logger = logging.getLogger("tokenloom.kernels")

Kernels: TypeAlias = dict[tuple[str, int], Any]  # by name and identity

_kernels: ContextVar[Kernels | None] = ContextVar("kernels", default=None)  # of this thread
_num_compiling = 0
_lock = threading.Lock()


def _launch_or_compile(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernels = _kernels.get()
    kernel = launch(function, *arguments, grid=grid, warmup=warmup or kernels is not None, **options)
    if kernels is not None:
        kernels.setdefault((function.__name__, id(kernel)), kernel)
    return kernel


@contextmanager
def compiling(executor: Executor) -> Iterator[Kernels]:
    """What the calling thread launches inside is compiled by `executor`, and is there when this ends.

    Yields the kernels, in the order of their first launch; what they hold can be read when this has ended.
    """
    kernels: Kernels = {}
    token = _kernels.set(kernels)
    _count(1)
    try:
        if AsyncCompileMode is None:
            logger.warning("this triton has no runtime._async_compile: kernels are compiled one after the other")
            yield kernels
        else:
            with AsyncCompileMode(executor):
                yield kernels
            kernels.update({key: kernel.result() for key, kernel in kernels.items() if hasattr(kernel, "result")})
    finally:
        _count(-1)
        _kernels.reset(token)


def load(kernels: Kernels, executor: Executor) -> None:
    """Put compiled kernels on the current device of the executor's threads, and make what launches them.

    Triton does so at a kernel's first launch; until 3.6 it has a C compiler make a module for each of them then.
    """
    for _ in executor.map(lambda kernel: kernel.run, kernels.values()):
        pass


def unfinished(kernels: Kernels) -> list[str]:
    """Names of those that an executor still compiles."""
    futures = [(name, getattr(kernel, "future", None)) for (name, _), kernel in list(kernels.items())]
    return sorted({name for name, future in futures if future is not None and not future.done()})


def _count(change: int) -> None:
    """Launches cost nothing more once nobody compiles."""
    global _num_compiling
    with _lock:
        _num_compiling += change
        JITFunction.run = _launch_or_compile if _num_compiling else launch
