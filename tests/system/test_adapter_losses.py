"""Processes are killed while more adapters than slots take turns on two ranks: nothing is lost, all answers are
peft's, a new core takes over the workers' slots, and a new group fills them from the engine's own store."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.system.adapter_engine import (
    OPTIONS,
    Models,
    Requests,
    check_strength,
    make_models,
    make_requests,
)
from tokenloom.tests.system.launched import serve

pytest.importorskip("peft")

RECOVERY_S = 60.0
NUM_REQUESTS = 63  # so many that a fast machine does not end them before the process is killed
MAX_TOKENS = 40


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.nightly)])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="module")
def engine(models: Models, num_ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Run an engine whose adapters' own files are gone."""
    runtime = tmp_path_factory.mktemp("losses")
    sources = shutil.copytree(models.checkpoint.parent / "adapters", runtime / "adapters")
    modules = [f"{name}={sources / name}" for name in models.adapters]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "enable_lora"]
    limits = ["--max-loras", "2", "--max-num-seqs", "8", "--tensor-parallel-size", str(num_ranks)]
    arguments = ["--model", str(models.checkpoint), "--enable-lora", *flags, *limits, "--lora-modules", *modules]
    for each in serve(Engine(runtime, arguments)):
        shutil.rmtree(sources)
        yield each


class Streams:
    """A run of all requests in a thread."""

    def __init__(self, client: Client, requests: Requests) -> None:
        self.outputs: list[RequestOutput] = []
        self._thread = threading.Thread(target=lambda: self.outputs.extend(requests.run(client)))
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> list[RequestOutput]:
        self._thread.join(RECOVERY_S)
        assert not self._thread.is_alive(), "the requests do not end"
        return self.outputs


@pytest.mark.parametrize("role", ["worker 0", "core", "frontend"])
def test_a_killed_process_changes_no_answer_while_adapters_take_turns(
    role: str, engine: Engine, models: Models
) -> None:
    requests = make_requests(models.names, NUM_REQUESTS, seed=len(role), max_tokens=MAX_TOKENS)
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        first_step = client.health().step
        streams = Streams(client, requests)
        deadline = time.monotonic() + RECOVERY_S
        while client.health().step < first_step + MAX_TOKENS:  # some requests are at their end, others wait
            assert time.monotonic() < deadline, "no steps"
            time.sleep(0.002)
        num_restarts = client.health().num_restarts
        engine.child(role).kill()
        assert streams.is_running, "the requests ended before the process"
        outputs = streams.wait()
        assert len(outputs) == NUM_REQUESTS and (role == "frontend" or client.health().num_restarts > num_restarts)
        requests.check(models.oracle, outputs)
        check_strength(client, models.names)
