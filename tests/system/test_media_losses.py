"""Processes are killed while prompts with media are read, encoded and answered: nothing is lost, and all answers are
those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, reconnecting, serve
from tokenloom.tests.system.loss_turns import turn_of
from tokenloom.tests.system.media_engine import OPTIONS, Checker, make_requests, num_encodes, run
from tokenloom.tests.system.media_families import HEARING, Models, make_gguf_models, make_models

pytestmark = turn_of("media")

NUM_REQUESTS = 12
MAX_TOKENS = 40
NUM_STEPS = 8  # with tokens, after which some media are encoded and others wait
ROLES = ("worker 0", "core", "frontend", "media")


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", *at_night("gemma3", "idefics3", *HEARING, "GGUF gemma3", "GGUF voxtral")]
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    form, _, family = request.param.rpartition(" ")
    make = make_gguf_models if form == "GGUF" else make_models
    return make(tmp_path_factory.mktemp("models"), family)


@pytest.fixture(scope="module")
def checker(models: Models) -> Checker:
    return Checker(models)


@pytest.fixture(scope="module", params=[1, *at_night(2)])
def engine(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    options = {name: value for name, value in (OPTIONS | models.options).items() if value is not None}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--tensor-parallel-size", str(request.param)]
    arguments = ["--model", str(models.checkpoint), *flags, *limits]
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("losses"), *arguments))


@pytest.mark.parametrize("role", ["core", "media", *at_night("worker 0", "frontend")])
def test_a_killed_process_changes_no_answer_to_media(
    role: str, engine: Engine, models: Models, checker: Checker
) -> None:
    requests = make_requests(models, 10 + ROLES.index(role), NUM_REQUESTS)
    with reconnecting(engine) as client, ThreadPoolExecutor(1) as pool:
        num_restarts = client.health().num_restarts
        if role == "media":  # it is killed while it holds a medium
            inject(engine.faults, "media.read", "delay 0.5")
        future = pool.submit(run, client, models, requests, MAX_TOKENS)
        if role == "media":
            assert engine.wait_struck("media.read", None, RECOVERY_S)
        else:
            for _ in range(NUM_STEPS):
                inject(engine.faults, "worker.sample", "delay 0.1", 0)  # longer than the next lines take
                assert engine.wait_struck("worker.sample", 0, RECOVERY_S)
        lost = engine.child(role)
        lost.kill()
        assert not future.done(), "the requests ended before the process"
        outputs = future.result(RECOVERY_S)
        assert engine.child(role).pid != lost.pid, "no other process has taken its place"
        assert role in ("frontend", "media") or client.health().num_restarts > num_restarts
        assert num_encodes(client) > 0
    checker.check(requests, outputs, MAX_TOKENS)
