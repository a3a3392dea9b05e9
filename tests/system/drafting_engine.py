"""The command of an engine in separate processes whose core is `drafting_core`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenloom import Client
from tokenloom.frontend import launch
from tokenloom.frontend.embedded.child_engine import ChildEngine
from tokenloom.frontend.launcher.supervisor.local_launcher import LocalLauncher
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.system.recorded_drafts import RECORD

COMMAND = (sys.executable, "-P", "-m", "tokenloom.tests.system.drafting_engine")


@contextmanager
def drafting_engine(config: EngineConfig, record: Path, environment: dict[str, str]) -> Iterator[Client]:
    """Serve with drafts of a record, and with further variables; yield a client."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {RECORD: str(record), **environment}.items():
            patch.setenv(name, value)
        engine = ChildEngine(config, COMMAND)
    try:
        with Client(engine.addresses) as client:
            yield client
    finally:
        engine.stop()


if __name__ == "__main__":
    LocalLauncher.modules = {**LocalLauncher.modules, "core": "tokenloom.tests.system.drafting_core"}
    sys.exit(launch.main())
