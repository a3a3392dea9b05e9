"""Fakes CUDA devices in each Python process with this folder on its PYTHONPATH, to rehearse programs that need one.

    PYTHONPATH=tests/support/fake_cuda TOKENLOOM_FAKE_CUDA=1 python -m pytest -m gpu tests/gpu

TOKENLOOM_FAKE_CUDA is the number of devices; without it nothing happens. Child processes inherit both variables. The
device's memory is the host's, its kernels run in Triton's interpreter, which this switches on even if the environment
says otherwise, and the driver's node exists. `fake_device` lists the likenesses and the differences.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

NUM_DEVICES = int(os.environ.get("TOKENLOOM_FAKE_CUDA") or 0)
NODES = ("/dev/nvidiactl", *(f"/dev/nvidia{index}" for index in range(NUM_DEVICES)))


def fake_torch(module: ModuleType) -> None:
    from fake_device import runtime, tensors

    tensors.install()
    runtime.install(NUM_DEVICES)


def fake_triton(module: ModuleType) -> None:
    from fake_device import launches

    launches.install()


class Installer:
    """Finds the modules that the fake changes, and changes them once they are imported."""

    changes: dict[str, Callable[[ModuleType], None]] = {  # noqa: RUF012 - typing is imported later
        "torch": fake_torch,
        "triton": fake_triton,
    }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                if (change := self.changes.pop(name, None)) is not None:
                    change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    exists = os.path.exists
    os.path.exists = lambda path: path in NODES or exists(path)
    sys.meta_path.insert(0, Installer())


if NUM_DEVICES:
    install()
