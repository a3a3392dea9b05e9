"""Fixtures of the frontend's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.frontend.client.client import Client
from tokenloom.tests.frontend.bench import Bench
from tokenloom.tests.frontend.fake_frontend import FakeFrontend


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeFrontend]:
    frontend = FakeFrontend(f"ipc://{tmp_path}/f")
    yield frontend
    frontend.close()


@pytest.fixture
def client(fake: FakeFrontend) -> Iterator[Client]:
    with Client(fake.address) as client:
        yield client
