"""An engine started by the command, of which nothing may be left."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from tokenloom.scripts.engine_process import Engine


class LaunchedEngine(Engine):
    """On one thread of the CPU. Leaving a `with` demands that nothing is left."""

    def __init__(self, runtime: Path, *arguments: str) -> None:
        super().__init__(runtime, ["--num-threads", "1", "--device", "cpu", *arguments])

    def wait_http(self) -> str:
        """The URL of its HTTP server."""
        self.wait_ready()
        return self.url

    def check_nothing_is_left(self, within_s: float = 3.0) -> None:
        deadline = time.monotonic() + within_s
        while found := self.leftovers():
            assert time.monotonic() < deadline, f"left behind: {found}"
            time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.check_nothing_is_left()
