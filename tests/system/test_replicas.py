"""An engine of several replicas: it answers as one does, and a lost core or worker of any replica changes no answer."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokenloom import Client, InternalError, RequestError, RequestOutput, SamplingParams
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.chaos_work import (
    Work,
    answers,
    check_equal,
    make_work,
    submit,
    with_adapters,
    without_effect,
)
from tokenloom.tests.support.today import at_night, some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import LaunchedEngine, client, lost, reconnecting, serve

__all__ = ["client"]  # fixtures

DEADLINE_S = 60.0
LIMITS = ["--step-timeout-s", "1", "--hang-timeout-s", "2", "--drain-timeout-s", "0.5"]
PROCESSES = ["core", "core of replica 1", "worker 0", "worker 0 of replica 1"]
KILLER = "tokenloom.tests.system.test_replicas:end_the_worker"


def end_the_worker(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: object) -> object:
    """End the process that calls it, as a logits processor."""
    os.kill(os.getpid(), signal.SIGKILL)
    return logits


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options with two adapters."""
    adapters = write_adapters(tmp_path_factory.mktemp("adapters"), DEMO_FOLDER, 2)
    modules = [f"{path.name}={path}" for path in adapters]
    lora = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--lora-modules", *modules]
    return ["--dtype", "float32", "--num-kv-blocks", "256", *lora]


@pytest.fixture(scope="module")
def work(options: list[str]) -> list[Work]:
    """Seeded and greedy requests with grammars, several answers, logprobs and adapters."""
    rng, names = random.Random(7), [module.partition("=")[0] for module in options[-2:]]
    return with_adapters(make_work(rng), names, rng)[::2]


@pytest.fixture(scope="module")
def calm(options: list[str], work: list[Work], tmp_path_factory: pytest.TempPathFactory) -> list[RequestOutput]:
    """The answers of an engine with one replica."""
    with LaunchedEngine(tmp_path_factory.mktemp("one"), *options) as engine, Client(engine.wait_ready()) as client:
        found = answers(client, work)
    assert not without_effect(work, found)
    return found


@pytest.fixture(scope="module")
def engine(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("two"), *options, *LIMITS, "--data-parallel-size", "2"))


def test_two_replicas_answer_as_one_and_share_the_work(
    engine: Engine, client: Client, work: list[Work], calm: list[RequestOutput]
) -> None:
    assert client.info().num_kv_blocks == 2 * 255, "the pools add up"
    check_equal(calm, answers(client, work))  # also the first use of each worker
    check_equal([*calm, *calm], answers(client, [*work, *work]))
    workers = [engine.child(name) for name in ("worker 0", "worker 0 of replica 1")]
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    equal = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)  # all cost the same, unlike those of `work`
    for future in [client.submit(f"{number} is a number", equal) for number in range(128)]:
        future.result(timeout=DEADLINE_S)
    spent = [sum(worker.cpu_times()[:2]) - since for worker, since in zip(workers, before, strict=True)]
    assert min(spent) > 0.25 * sum(spent), f"one replica computes nearly all: {spent}"
    wait_until(lambda: client.health().num_free_blocks == 2 * 255, client.health)


@pytest.mark.parametrize(
    ("name", "number"),
    some([(name, number) for number in (signal.SIGKILL, signal.SIGSTOP) for name in PROCESSES], 1),
)
def test_a_lost_process_of_a_replica_changes_no_answer(
    engine: Engine, client: Client, work: list[Work], calm: list[RequestOutput], name: str, number: signal.Signals
) -> None:
    futures = submit(client, work)
    wait_running(client, 20)
    with lost(engine, name, number):
        check_equal(calm, futures)
        if number == signal.SIGSTOP:  # a stopped worker of an idle replica is noticed by its next step
            check_equal(calm, answers(client, work))
    check_equal(calm, answers(client, work))


def test_orders_are_carried_out_by_all_replicas_and_hold_for_the_workers_that_replace_lost_ones(
    engine: Engine, client: Client, work: list[Work], calm: list[RequestOutput]
) -> None:
    client.sleep()
    with lost(engine, "worker 0 of replica 1"):
        pass
    futures = submit(client, work)
    step = client.health().step
    assert client.is_sleeping()
    client.wake_up()
    check_equal(calm, futures)
    assert client.health().step > step and not client.is_sleeping()
    client.pause()
    futures = submit(client, work)
    client.reload(DEMO_FOLDER)
    assert client.reset_prefix_cache() and not any(future.done() for future in futures)
    client.resume()
    check_equal(calm, futures)


def pids(engine: Engine) -> list[int]:
    return [engine.child(name).pid for name in PROCESSES]


def test_a_rolling_restart_replaces_all_processes_and_changes_no_answer(
    engine: Engine, client: Client, work: list[Work], calm: list[RequestOutput]
) -> None:
    before, health = pids(engine), client.health()
    futures = [*submit(client, work), *submit(client, work)]
    client.restart_replicas()
    after = pids(engine)
    assert not set(before) & set(after)
    check_equal([*calm, *calm], futures)
    client.restart_replicas(1)
    assert [one == other for one, other in zip(after, pids(engine), strict=True)] == [True, False, True, False]
    check_equal(calm, answers(client, work))
    now = client.health()
    assert (now.num_restarts, now.last_failure) == (health.num_restarts, health.last_failure)
    with pytest.raises(RequestError, match="there is no replica 2: replicas 0, 1 run"):
        client.restart_replicas(2)


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["frontend", "core of replica 1", "worker 0"])
def test_a_process_lost_during_a_rolling_restart_changes_no_answer(
    engine: Engine, client: Client, work: list[Work], calm: list[RequestOutput], name: str
) -> None:
    for delay_s in (0.0, 0.3, 1.0):
        before, futures = pids(engine), submit(client, work)
        with ThreadPoolExecutor(1) as pool:
            restart = pool.submit(client.restart_replicas)
            with contextlib.suppress(FutureTimeoutError):
                restart.result(delay_s)
            engine.child(name).kill()
            restart.result(DEADLINE_S)
        check_equal(calm, futures)
        assert not set(before) & set(pids(engine))


def of_grammars(engine: Engine, role: str) -> list[psutil.Process]:
    """Return the processes of this title, at most one of each replica."""
    return [process for process in engine.processes() if process.cmdline()[:1] == [f"tokenloom {role}"]]


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["grammar", "prover"])
@pytest.mark.parametrize("num_stopped", [1, 2])
@pytest.mark.parametrize("is_running", [False, True])
def test_stopped_processes_of_grammars_hold_up_no_other_answer_and_are_replaced(
    engine: Engine, client: Client, role: str, num_stopped: int, is_running: bool
) -> None:
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
    known, new = (
        plain.replace(structured_outputs={"json": schema | {"description": text}})
        for text in ("known", str(random.random()))
    )
    for number in range(50):  # until both replicas have had some
        warm = [plain.replace(structured_outputs={"regex": f"[a-d]{{{number + i + 1}}}"}) for i in range(4)]
        client.generate(["x"] * 4, warm, use_tqdm=False)
        if len(of_grammars(engine, role)) == 2:
            break
    (calm,) = client.generate("The", known, use_tqdm=False)
    (calm_plain,) = client.generate("The", plain, use_tqdm=False)
    running = [client.submit("The", known) for _ in range(6 if is_running else 0)]
    stopped = of_grammars(engine, role)[:num_stopped]
    assert len(stopped) == num_stopped
    for process in stopped:
        process.suspend()
    futures = [*running, *(client.submit("The", params) for params in [known, new] * 4)]
    check_equal([calm_plain] * 8, [client.submit("The", plain) for _ in range(8)])
    assert all(process.is_running() for process in stopped), "the plain answers waited for their replacement"
    check_equal([calm] * len(futures), futures)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    check_equal([calm, calm_plain] * 4, client.generate(["The"] * 8, [known, plain] * 4, use_tqdm=False))


def check_poison(
    client: Client, work: list[Work], calm: list[RequestOutput], form: Any, params: SamplingParams, message: str
) -> None:
    """Check that a request is given up after at most three losses, with this message, and that others complete."""
    before, futures = client.health().num_restarts, submit(client, work)
    with pytest.raises(InternalError, match=message) as caught:
        client.submit(form, params, request_id="poison").result(timeout=DEADLINE_S)
    assert re.search("request poison: ", str(caught.value))
    check_equal(calm, futures)
    assert client.health().num_restarts - before <= 3


@pytest.mark.nightly
def test_a_request_that_ends_workers_is_given_up_after_three_losses_and_others_complete(
    options: list[str], tmp_path: Path, work: list[Work], calm: list[RequestOutput]
) -> None:
    poison = SamplingParams(max_tokens=5, logits_processors=[KILLER])
    more = ["--dp", "3", "--allowed-logits-processors", KILLER]
    for engine in serve(LaunchedEngine(tmp_path, *options, *LIMITS, *more)):
        with reconnecting(engine) as client:
            message = "3 times and was given up; last: worker 0"
            check_poison(client, work, calm, "The capital of France is", poison, message)


@pytest.mark.parametrize("point", ["core.add", *at_night("core.admit")])
def test_a_request_that_ends_a_core_before_its_start_is_announced_is_given_up_after_three_losses(
    engine: Engine, client: Client, work: list[Work], calm: list[RequestOutput], point: str
) -> None:
    prompt = [7] * 333  # no other prompt has this length
    fault = engine.faults / f"{point}.{len(prompt)}"
    fault.write_text("kill always")
    try:
        check_poison(client, work, calm, prompt, SamplingParams(max_tokens=5), "3 times and was given up; last: core")
    finally:
        fault.unlink()
