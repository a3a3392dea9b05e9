"""A process dies during a reload: the call reports the true outcome, all ranks hold the same weights, and an open
request continues, first with the old and then with the new weights, never with a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenloom import Client, InternalError, RequestOutput, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.today import at_night, some
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, client, serve

__all__ = ["client"]  # fixtures

OPTIONS = ["--max-model-len", "500", "--step-timeout-s", "5"]
PROMPT = [5 + i % 90 for i in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=200)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_checkpoint(folder / "one", "qwen3", seed=1), tiny_checkpoint(folder / "two", "qwen3", seed=2)


@pytest.fixture(scope="module", params=[1, *at_night(2)], ids="tp{}".format)
def engine(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Start an engine with the first checkpoint."""
    options = [*OPTIONS, "--model", str(folders[0]), "--tensor-parallel-size", str(request.param)]
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *options))


def answer(client: Client, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return client.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def workers(engine: Engine) -> set[int]:
    return {process.pid for process in engine.processes() if "worker" in " ".join(process.cmdline())}


def begin(engine: Engine, client: Client) -> Future[RequestOutput]:
    """Submit a request and wait until one of its steps runs."""
    future = client.submit(PROMPT, LONG)
    assert engine.inject("worker.forward", "delay 0", 0, RECOVERY_S)
    return future


def lose(engine: Engine, client: Client, folder: Path, role: str) -> None:
    """Reload from `folder`, and kill `role` when all ranks but the last have read it."""
    last = len(workers(engine)) - 1
    inject(engine.faults, "worker.reload", "delay 0.5", last)
    with ThreadPoolExecutor(1) as pool:
        reload = pool.submit(client.reload, folder)
        assert engine.wait_struck("worker.reload", last, RECOVERY_S)
        engine.child(role).kill()
        reload.result(RECOVERY_S)


def check_halves(client: Client, tokens: list[int], before: list[int]) -> None:
    """Check that the tokens after the change of weights are those of the present weights."""
    num_shared = next((i for i, pair in enumerate(zip(tokens, before, strict=True)) if pair[0] != pair[1]), len(tokens))
    assert 0 < num_shared < len(tokens), "the request was not open in the reload"
    rest = answer(client, PROMPT + tokens[:num_shared], GREEDY.replace(max_tokens=len(tokens) - num_shared))
    assert tokens[num_shared:] == rest


def test_a_reload_is_completed_after_the_frontend_is_replaced(
    engine: Engine, client: Client, folders: tuple[Path, Path]
) -> None:
    one, two = folders
    client.reload(two)
    expected = answer(client)
    client.reload(one)
    before, former = answer(client, params=LONG), workers(engine)
    future = begin(engine, client)
    lose(engine, client, two, "frontend")
    assert answer(client) == expected
    assert workers(engine) == former
    check_halves(client, future.result(RECOVERY_S).outputs[0].token_ids, before)


@pytest.mark.parametrize("role", some(["core", "worker 0"], 1))
def test_a_reload_that_loses_the_core_or_a_worker_fails_and_keeps_the_old_weights(
    engine: Engine, client: Client, folders: tuple[Path, Path], role: str
) -> None:
    one, two = folders
    client.reload(two)  # not the weights of the start
    before, former = answer(client, params=LONG), workers(engine)
    future = begin(engine, client)
    with pytest.raises(InternalError, match=f"the old ones stay: {role}"):
        lose(engine, client, one, role)
    assert future.result(RECOVERY_S).outputs[0].token_ids == before
    assert workers(engine) & former == set(), "some may have read the new ones"
