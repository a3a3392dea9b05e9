"""An engine gives the same answers while its Redis is away or hangs, says so, and uses it again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from tokenloom.frontend.client.client import Client
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.core.tiers.network.redis_server import RedisServer, free_port, needs_redis
from tokenloom.tests.system.launched import LaunchedEngine

DEADLINE_S = 120.0
PROMPTS = [f"prompt {number} " + "word " * 100 for number in range(12)]
AGAIN = "answers again"
NOT_USED = "is not used for now, and requests go on: "
POOL = ("--num-kv-blocks", "64", "--max-model-len", "512", "--kv-host-bytes", str(1 << 20))


class Served:
    """An engine for a Redis at `port`."""

    def __init__(self, engine: LaunchedEngine, port: int) -> None:
        self.engine, self.port = engine, port
        self._numbers = itertools.count()

    def ask(self) -> list[str]:
        with Client(self.engine.address) as client:
            answers = client.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)
        return [answer.outputs[0].text for answer in answers]

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait for Redis to be used, or not: with new prompts, so that it is asked for their blocks."""
        deadline = time.monotonic() + DEADLINE_S
        with Client(self.engine.address) as client:
            while not is_so():
                assert time.monotonic() < deadline, self.engine.errors.read_text()
                new = f"new {next(self._numbers)} " + "word " * 100
                client.generate([new], SamplingParams(max_tokens=2), use_tqdm=False)

    def num_lines(self, text: str) -> int:
        return self.engine.errors.read_text(encoding="utf-8").count(text)

    def is_open(self) -> bool:
        sources = httpx2.get(f"{self.engine.url}/kv", timeout=DEADLINE_S).json()["tiers"]["sources"]
        return any(each["name"] == "remote" and each["open"] and not each["breaker_open"] for each in sources)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    key, port = tmp_path / "key", free_port()
    key.write_text("k" * 40)
    key.chmod(0o600)
    remote = ("--kv-remote", f"redis://127.0.0.1:{port}/0", "--kv-key-file", str(key))
    with LaunchedEngine(tmp_path, "--http", "0", *POOL, *remote) as engine:
        engine.wait_ready()
        yield Served(engine, port)
        assert engine.stop() == 0


@needs_redis
@pytest.mark.nightly
def test_a_redis_that_is_away_hangs_dies_and_comes_back_changes_no_answer(served: Served, tmp_path: Path) -> None:
    calm = served.ask()
    served.wait(lambda: served.num_lines(NOT_USED) == 1)
    assert served.ask() == calm and served.num_lines("start it, or give another --kv-remote") == 1
    server = RedisServer(tmp_path, port=served.port)
    try:
        served.wait(served.is_open)
        server.freeze()
        served.wait(lambda: served.num_lines(NOT_USED) == 2)
        assert served.ask() == calm
        server.thaw()
        served.wait(lambda: served.num_lines(AGAIN) == 2)
        server.kill()
        served.wait(lambda: served.num_lines(NOT_USED) == 3)
        assert served.ask() == calm
        server.start()
        served.wait(lambda: served.num_lines(AGAIN) == 3)
        assert served.is_open() and served.ask() == calm
    finally:
        server.close()
