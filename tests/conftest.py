"""Selects Triton's interpreter if there is no GPU, before anything imports triton, and sleeping waits for OpenMP.
A slow machine fails no property test. The end of a run prints the day of its cases. No garbage is
searched for among the collected tests, which stay to the end.

Temporary folders have short names, since engines put sockets there.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tokenloom.tests.support import today

# As the engine's workers do. Spinning threads of several test processes would take each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


_numbers = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder. pytest's own numbering lists all folders of the run for each."""
    return tmp_path_factory.mktemp(f"t{next(_numbers)}", numbered=False)


@pytest.fixture
def no_ignored_signals() -> Iterator[None]:
    """Let SIGINT and SIGHUP act, also in a run that ignores them: one in the background, or under nohup."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    today.Run.takes_night = "not nightly" not in config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"cases of the day: {today.VARIABLE}={os.environ[today.VARIABLE]}")
