"""Processes are killed while prompts with images are read, encoded and answered: nothing is lost, and all answers are
those of transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.system.image_engine import (
    OPTIONS,
    Checker,
    ImageRequest,
    Models,
    make_models,
    make_requests,
    num_encodes,
    run,
)
from tokenloom.tests.system.launched import serve

RECOVERY_S = 60.0
NUM_REQUESTS = 12
MAX_TOKENS = 40
NUM_STEPS = 8  # with tokens, after which some images are encoded and others wait
ROLES = ("worker 0", "core", "frontend", "media")


@pytest.fixture(
    scope="module",
    params=["qwen2_5_vl", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "idefics3"))],
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def checker(models: Models) -> Checker:
    return Checker(models)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def engine(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--tensor-parallel-size", str(request.param)]
    arguments = ["--model", str(models.checkpoint), *flags, *limits]
    yield from serve(Engine(tmp_path_factory.mktemp("losses"), arguments))


class Streams:
    """A run of all requests in a thread."""

    def __init__(self, client: Client, requests: Sequence[ImageRequest]) -> None:
        self.outputs: list[RequestOutput] = []
        self._thread = threading.Thread(target=lambda: self.outputs.extend(run(client, requests, MAX_TOKENS)))
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> list[RequestOutput]:
        self._thread.join(RECOVERY_S)
        assert not self._thread.is_alive(), "the requests do not end"
        return self.outputs


@pytest.mark.parametrize(
    "role", [pytest.param(role, marks=() if role in ("core", "media") else pytest.mark.slow) for role in ROLES]
)
def test_a_killed_process_changes_no_answer_to_images(
    role: str, engine: Engine, models: Models, checker: Checker
) -> None:
    requests = make_requests(models.marker, 10 + ROLES.index(role), NUM_REQUESTS)
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        num_restarts = client.health().num_restarts
        if role == "media":  # it is killed while it holds an image
            inject(engine.faults, "media.read", "delay 0.5")
        streams = Streams(client, requests)
        if role == "media":
            assert engine.wait_struck("media.read", None, RECOVERY_S)
        else:
            for _ in range(NUM_STEPS):
                inject(engine.faults, "worker.sample", "delay 0.1", 0)  # longer than the next lines take
                assert engine.wait_struck("worker.sample", 0, RECOVERY_S)
        engine.child(role).kill()
        assert streams.is_running, "the requests ended before the process"
        outputs = streams.wait()
        assert role in ("frontend", "media") or client.health().num_restarts > num_restarts
        assert num_encodes(client) > 0
    checker.check(requests, outputs, MAX_TOKENS)
