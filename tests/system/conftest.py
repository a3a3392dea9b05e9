"""An HTTP engine for each test file that requests one, and its clients.

The engine is not shared between files: some tests look for engines among this program's children.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import DEADLINE_S, KEY, OPTIONS
from tokenloom.tests.system.launched import LaunchedEngine


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LaunchedEngine(tmp_path_factory.mktemp("http"), *OPTIONS) as engine:
        yield engine.wait_http()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=DEADLINE_S) as http:
        yield http
