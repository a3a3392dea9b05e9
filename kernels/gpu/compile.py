"""Ahead-of-time compilation: operations called inside `compiling` compile their kernels instead of launching them.

Their tensors need no memory. Kernels compile in parallel threads: Triton's compiler releases the GIL for most of the
time, and ptxas is a process of its own. This uses a private module of Triton; without it kernels compile one by one.
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

Kernels: TypeAlias = dict[tuple[str, int], Any]  # compiled kernels by name and id()

_kernels: ContextVar[Kernels | None] = ContextVar("kernels", default=None)  # of this thread's `compiling` context
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
    """Compile in `executor`, without running it, every kernel that the calling thread launches in this context.

    Yields a dict, to which kernels are added in the order of their first launch. The exit of the context waits until
    all are compiled, and raises the error of one that fails. Without AsyncCompileMode each launch compiles its kernel
    and raises its error.
    """
    kernels: Kernels = {}
    token = _kernels.set(kernels)
    _count(1)
    try:
        if AsyncCompileMode is None:
            logger.warning("this Triton has no runtime._async_compile: kernels are compiled one by one")
            yield kernels
        else:
            with AsyncCompileMode(executor):
                yield kernels
            kernels.update({key: kernel.result() for key, kernel in kernels.items() if hasattr(kernel, "result")})
    finally:
        _count(-1)
        _kernels.reset(token)


def load(kernels: Kernels, executor: Executor) -> None:
    """Load compiled kernels onto the current device of the executor's threads and build their launchers.

    Triton otherwise does this at a kernel's first launch; up to 3.6 it runs a C compiler for each launcher.
    """
    for _ in executor.map(lambda kernel: kernel.run, kernels.values()):
        pass


def unfinished(kernels: Kernels) -> list[str]:
    """Return the names of the kernels that are still being compiled."""
    futures = [(name, getattr(kernel, "future", None)) for (name, _), kernel in list(kernels.items())]
    return sorted({name for name, future in futures if future is not None and not future.done()})


def _count(change: int) -> None:
    """Add to the number of open `compiling` contexts; while it is 0, launches run without this module's check."""
    global _num_compiling
    with _lock:
        _num_compiling += change
        JITFunction.run = _launch_or_compile if _num_compiling else launch
