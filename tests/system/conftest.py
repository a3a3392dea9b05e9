"""Two engines for all test files of a process, and their clients: `engine` serves HTTP like most users' engines, and
`equipped` has an option of each kind.

A file whose subject is the engine itself (its processes, its start, further options) starts its own; its `engine` or
`url` then replaces the fixture here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import httpx2
import openai
import pytest

from tokenloom.tests.system.equipped_engine import EquippedEngine
from tokenloom.tests.system.http_engine import KEY, OPTIONS, open_http, open_openai
from tokenloom.tests.system.launched import LaunchedEngine

EngineT = TypeVar("EngineT", bound=LaunchedEngine)


class SharedEngine(Generic[EngineT]):
    """Owns an engine: starts it at its first use, and anew if a test has ended it."""

    def __init__(self, start: Callable[[Path], EngineT], factory: pytest.TempPathFactory) -> None:
        self._start, self._factory = start, factory
        self._engine: EngineT | None = None

    def running(self) -> EngineT:
        if self._engine is not None and self._engine.process.poll() is not None:
            with self._engine:  # checks its leftovers
                self._engine = None
        if self._engine is None:
            self._engine = self._start(self._factory.mktemp("http"))
            self._engine.wait_ready()
        return self._engine

    def stop(self) -> None:
        """Stop the engine, which exits with 0 and leaves nothing, although it served many files."""
        if self._engine is not None:
            with self._engine as engine:
                if engine.process.poll() is None:
                    engine.processes()
                    assert engine.stop() == 0


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine[LaunchedEngine]]:
    shared = SharedEngine(lambda folder: LaunchedEngine(folder, *OPTIONS), tmp_path_factory)
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def shared_equipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine[EquippedEngine]]:
    shared = SharedEngine(EquippedEngine, tmp_path_factory)
    yield shared
    shared.stop()


@pytest.fixture
def engine(shared_engine: SharedEngine[LaunchedEngine]) -> LaunchedEngine:
    return shared_engine.running()


@pytest.fixture
def equipped(shared_equipped: SharedEngine[EquippedEngine]) -> EquippedEngine:
    return shared_equipped.running()


@pytest.fixture
def url(engine: LaunchedEngine) -> str:
    return engine.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with open_openai(url, KEY) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with open_http(url, KEY) as http:
        yield http


@pytest.fixture
def stranger(url: str) -> Iterator[httpx2.Client]:
    """Yield a client without the key."""
    with open_http(url) as http:
        yield http


@pytest.fixture
def door(equipped: EquippedEngine) -> Iterator[httpx2.Client]:
    """Yield a client of the HTTP server of the equipped engine, which wants no key."""
    with open_http(equipped.url) as http:
        yield http
