"""A fake GPU for tests of device steps. Kernels run in Triton's interpreter, a captured step runs again, and waits for
the device and launches are observed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

import tokenloom.tests.kernels.gpu.interpreter  # noqa: F401
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.tests.workers.history_model import ONE_GROUP, HistoryModel
from tokenloom.tests.workers.random_schedule import MAX_MODEL_LEN, MAX_NUM_SEQS, new_batch, new_caches
from tokenloom.workers.device.cuda_graphs import Step
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.models.decoder import DecoderModel

SMALL = {  # fields of a model, for the interpreter
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
}


def device_ops() -> TritonOps:
    """Return the operations of the fake device, which has few programs at once: each takes some time to begin."""
    return TritonOps(90, max_programs=4)


class FakeRecorder:
    """Replays a captured step by running it again, without a GPU."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, step: Step) -> Step:
        def replay() -> None:
            self.num_replays += 1
            step()

        return replay


class DeviceHistoryModel(HistoryModel):
    """Finds the tokens and lengths of a decode step on the device, as a graph must."""

    _ops = device_ops()


def new_runner(
    recorder: FakeRecorder | None,
    model: DecoderModel | DeviceHistoryModel | None = None,
    kv_caches: Sequence[Tensor] | None = None,
    group: ParallelGroup | None = None,
    max_loras: int = 0,
    windows: Sequence[int | None] = ONE_GROUP,
) -> ModelRunner:
    batch = new_batch(windows, max_loras=max_loras)
    runs, group = model or DeviceHistoryModel(windows), group or ParallelGroup()
    kv_caches = kv_caches or new_caches(windows)
    limits, has_adapters = (MAX_NUM_SEQS, MAX_MODEL_LEN), max_loras > 0
    device_runner = DeviceRunner(runs, kv_caches, *limits, group, recorder, (1,), has_adapters)
    return ModelRunner(runs, batch, kv_caches, group, device_runner=device_runner)


class NoWaiting(TorchFunctionMode):
    """Fails at whatever makes a host wait for its device, and counts copies between them.

    Triton's interpreter, which looks into tensors as a device does, is left alone.
    """

    WAITS = (
        *("item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "masked_select", "unique", "equal", "allclose"),
        *("__bool__", "__int__", "__float__", "__index__", "pin_memory"),
    )

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        frame = sys._getframe(1)
        if f"{os.sep}triton{os.sep}" not in frame.f_code.co_filename and not self._is_host(args):
            assert name not in self.WAITS, f"{name} in {frame.f_code.co_filename}:{frame.f_lineno}"
            if name in ("__getitem__", "__setitem__", "index_put_"):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                assert not any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index), "boolean index"
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _is_host(args: tuple[Any, ...]) -> bool:
        """Pinned memory, which is the host's: the staging buffer's bytes."""
        return bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.uint8


class Launches(TorchDispatchMode):
    """Counts launches: kernels, and torch's operations that compute or copy, except those of the interpreter."""

    VIEWS = (
        *("empty", "empty_like", "view", "reshape", "flatten", "slice", "select", "split", "unbind", "t", "alias"),
        *("detach", "to", "lift_fresh"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._kernel: FrameType | None = None  # the last one

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kernel = function.overloadpacket.__name__, running_kernel()
        if kernel is None:
            self.counts[name] += name not in self.VIEWS and not name.startswith("resolve_")
        elif kernel is not self._kernel:  # it copies its arguments before it runs
            self._kernel = kernel
            self.counts[kernel.f_locals["self"].fn.__name__] += 1
        return function(*args, **(kwargs or {}))


def running_kernel() -> FrameType | None:
    """Return the frame in which the interpreter runs a kernel."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not GridExecutor.__call__.__code__:
        frame = frame.f_back
    return frame
