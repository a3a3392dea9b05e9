"""Engines started by the command for tests, which must leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.waiting import wait_until


class LaunchedEngine(Engine):
    """An engine on one CPU thread. Leaving a `with` checks that no process and no file is left."""

    def __init__(self, runtime: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        super().__init__(runtime, ["--num-threads", "1", "--device", "cpu", *arguments], prefix=prefix)

    def wait_http(self) -> str:
        """Wait until the engine is ready and return the URL of its HTTP server."""
        self.wait_ready()
        return self.url

    def check_nothing_is_left(self, within_s: float = 3.0) -> None:
        """Check that the engine's processes and files are gone, or go within seconds of a `Deadline`."""
        wait_until(lambda: not self.leftovers(), lambda: f"left behind: {self.leftovers()}", within_s, self.seen_ids)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.check_nothing_is_left()


def newest_engine() -> list[psutil.Process]:
    """Return the processes of the engine that this program started last, as by LLM: others may run beside it."""
    engines = [child for child in psutil.Process().children() if "tokenloom supervisor" in " ".join(child.cmdline())]
    supervisor = max(engines, key=psutil.Process.create_time)
    return [supervisor, *supervisor.children(recursive=True)]


def serve(engine: Engine) -> Iterator[Engine]:
    """Yield the engine once it is ready, for a fixture; at the end check that it exits with 0 and leaves nothing."""
    with engine:
        engine.wait_ready()
        yield engine
        engine.processes()
        assert engine.stop() == 0 and not engine.leftovers()
