"""One HTTP engine for all test files of a process that do not need another, and its clients.

A file whose subject is the engine itself (its processes, its end, its options) starts its own: `engine` or `url` of the
file then replaces the fixture here.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import DEADLINE_S, KEY, OPTIONS
from tokenloom.tests.system.launched import LaunchedEngine


class SharedEngine:
    """Owns the engine: starts it at its first use, and anew if a test has ended it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._engine: LaunchedEngine | None = None

    def running(self) -> LaunchedEngine:
        if self._engine is not None and self._engine.process.poll() is not None:
            with self._engine:  # its leftovers
                self._engine = None
        if self._engine is None:
            self._engine = LaunchedEngine(self._factory.mktemp("http"), *OPTIONS)
            self._engine.wait_ready()
        return self._engine

    def stop(self) -> None:
        """Stop the engine, which exits with 0 and leaves nothing, although it served many files."""
        if self._engine is not None:
            with self._engine as engine:
                engine.processes()
                assert engine.stop() == 0


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    shared = SharedEngine(tmp_path_factory)
    yield shared
    shared.stop()


@pytest.fixture
def engine(shared_engine: SharedEngine) -> LaunchedEngine:
    return shared_engine.running()


@pytest.fixture
def url(engine: LaunchedEngine) -> str:
    return engine.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=DEADLINE_S) as http:
        yield http
