"""Processes are killed while more adapters than slots take turns on two ranks: nothing is lost, all answers are
peft's, a new core takes over the workers' slots, and a new group fills them from the engine's own store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system.adapter_engine import OPTIONS, Models, check_strength, lora, make_models, make_requests
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import RECOVERY_S, reconnecting, serve
from tokenloom.tests.system.loss_turns import turn_of

pytestmark = turn_of("adapters")

pytest.importorskip("peft")

NUM_REQUESTS = 63  # so many that a fast machine does not end them before the process is killed
MAX_TOKENS = 40


@pytest.fixture(scope="module", params=[2, *at_night(1)])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="module")
def engine(models: Models, num_ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Run an engine without its adapters' own files."""
    runtime = tmp_path_factory.mktemp("losses")
    sources = shutil.copytree(models.checkpoint.parent / "adapters", runtime / "adapters")
    modules = [f"{name}={sources / name}" for name in models.adapters]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "enable_lora"]
    limits = ["--max-loras", "2", "--max-num-seqs", "8", "--tensor-parallel-size", str(num_ranks)]
    arguments = ["--model", str(models.checkpoint), "--enable-lora", *flags, *limits, "--lora-modules", *modules]
    for each in serve(Engine(runtime, arguments)):
        shutil.rmtree(sources)
        yield each


@pytest.mark.parametrize("role", ["core", *at_night("worker 0", "frontend")])
def test_a_killed_process_changes_no_answer_while_adapters_take_turns(
    role: str, engine: Engine, models: Models
) -> None:
    requests = make_requests(models.names, NUM_REQUESTS, seed=len(role), max_tokens=MAX_TOKENS)
    with reconnecting(engine) as client:
        num_restarts = client.health().num_restarts
        futures = [
            client.submit(prompt, params, lora_request=lora(name))
            for prompt, params, name in zip(requests.prompts, requests.params, requests.adapters, strict=True)
        ]
        wait_running(client, MAX_TOKENS)  # some requests are at their end, others wait
        engine.child(role).kill()
        assert not all(future.done() for future in futures), "the requests ended before the process"
        outputs = [future.result(RECOVERY_S) for future in futures]
        assert role == "frontend" or client.health().num_restarts > num_restarts
        requests.check(models.oracle, outputs)
        check_strength(client, models.names)
