"""Triton on the fake devices: its interpreter below `JITFunction.run`, so that replacements of `run` work as on a GPU.

A launch "compiles" its kernel if no launch of this signature came before, and calls Triton's hook. The interpreter runs
one kernel at a time, because it changes Triton's language for the time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction

from . import interpreting, runtime, streams
from .tensors import CudaTensor, inner_of

ALIGNMENT = 16
NUM_BENCHMARK_RUNS = 2

_lock = threading.RLock()
_kernels: dict[tuple[Any, ...], Kernel] = {}


class Executor(GridExecutor):
    """Runs a kernel on the memory that its arguments have, where Triton's copies it there and back."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


class Kernel:
    """A kernel for one signature of launches."""

    packed_metadata = None

    def __init__(self, function: InterpretedFunction) -> None:
        self.function = function
        self.name = function.__name__
        self.metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=0, name=self.name)

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        """Launch as Triton's launcher: the stream, four values that say nothing here, hooks, then all arguments."""
        *_, _enter, _leave = rest[:6]
        self.launch((x, y, z), rest[6:], {})

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launch((*grid, 1, 1)[:3], arguments, {})

    def launch(self, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        for index, value in enumerate(arguments):
            if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
                raise ValueError(f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?)")
        here = tuple(map(inner_of, arguments))
        constants = {name: inner_of(value) for name, value in constants.items()}

        def run() -> None:
            with _lock, np.errstate(all="ignore"), torch.inference_mode():
                executor = Executor(self.function.rewrite(), self.function.arg_names, grid, self.function.pre_run_hooks)
                executor(*here, **constants)

        launches = streams.capture()
        if launches is None:
            run()
        else:
            launches.append(run)


def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Kernel:
    """Launch a kernel, or only compile it, as JITFunction.run."""
    kernel = _compiled(function, arguments, options)
    if not warmup:
        names = set(function.arg_names)
        constants = {name: value for name, value in options.items() if name in names}
        if callable(grid):
            grid = grid(dict(zip(function.arg_names, arguments, strict=False)) | constants)
        kernel.launch((*grid, 1, 1)[:3], arguments, constants)
    return kernel


def _compiled(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Kernel:
    """Return the kernel for arguments of such types, alignments and constants."""
    signature: list[Any] = [id(function), streams.current_device(), *sorted(options.items(), key=lambda item: item[0])]
    for value in (*arguments,):
        if isinstance(value, Tensor):
            signature.append((value.dtype, value.data_ptr() % ALIGNMENT == 0))
        elif type(value) is int:
            signature.append((value == 1, value % ALIGNMENT == 0, -(1 << 31) <= value < 1 << 31))
        else:
            signature.append(type(value))
    key = tuple(each if _is_hashable(each) else repr(each) for each in signature)
    with _lock:
        if key not in _kernels:
            _kernels[key] = Kernel(function)
            hook: Any = knobs.runtime.jit_post_compile_hook
            if hook is not None:
                hook(key=repr(key), repr=f"{function.__name__}{key[2:]}", fn=function, is_manual_warmup=False)
        return _kernels[key]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class _Driver:
    """The driver of the fake devices."""

    def get_current_device(self) -> int:
        return streams.current_device()

    def get_current_stream(self, device: int) -> int:
        return streams.current_stream().cuda_stream

    def get_current_target(self) -> GPUTarget:
        major, minor = runtime.CAPABILITY
        return GPUTarget("cuda", 10 * major + minor, 32)

    @property
    def utils(self) -> Any:
        return self


def install() -> None:
    JITFunction.run = run
    InterpretedFunction.run = lambda function, *args, **kwargs: JITFunction.run(function, *args, **kwargs)
    InterpretedFunction.module = property(lambda function: function.fn.__module__)
    interpreting.install()
    driver.set_active(_Driver())
    triton.testing.do_bench, triton.testing.do_bench_cudagraph = do_bench, do_bench_cudagraph


def do_bench(fn: Callable[[], Any], **_: Any) -> float:
    """Return the median of a few runs in milliseconds."""
    times_ms = []
    for _run in range(NUM_BENCHMARK_RUNS):
        begun = time.perf_counter()
        fn()
        times_ms.append(max((time.perf_counter() - begun) * 1e3, 1e-3))
    return statistics.median(times_ms)


def do_bench_cudagraph(fn: Callable[[], Any], **_: Any) -> float:
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return do_bench(graph.replay)
