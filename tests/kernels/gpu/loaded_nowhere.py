"""A Triton driver without a device, which records loads and launches."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from tokenloom.scripts.gpu.compile_kernels import NoDevice


@dataclass(frozen=True)
class LoadedNowhere(NoDevice):
    """`threads`: that loaded a kernel, one by one. `launches`: grid and arguments of each."""

    threads: list[str] = field(default_factory=list)
    launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=list)

    @property
    def utils(self) -> LoadedNowhere:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def launcher_cls(self, source: object, metadata: object) -> Any:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            self.launches.append(((x, y, z), rest[6:]))  # stream, function, metadata of two kinds, two hooks

        return launch

    def load_binary(self, *arguments: object) -> tuple[int, int, int, int, int]:
        self.threads.append(threading.current_thread().name)
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass
