"""An engine of several replicas: it answers as one does, and a lost core or worker of any replica changes no answer."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import psutil
import pytest

from tokenloom import Client, InternalError, RequestError, RequestOutput, SamplingParams
from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.chaos_work import Work, difference, make_work, with_adapters, without_effect
from tokenloom.tests.system.launched import serve

DEADLINE_S = 60.0
OPTIONS = ["--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--num-kv-blocks", "256"]
LIMITS = ["--step-timeout-s", "1", "--hang-timeout-s", "2", "--drain-timeout-s", "0.5"]
PROCESSES = ["core", "core of replica 1", "worker 0", "worker 0 of replica 1"]
KILLER = "tokenloom.tests.system.test_replicas:end_the_worker"


def end_the_worker(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: object) -> object:
    """End the process that calls it, as a logits processor."""
    os.kill(os.getpid(), signal.SIGKILL)
    return logits


def answers_of(client: Client, work: list[Work]) -> list[RequestOutput]:
    forms, adapters = [each.form for each in work], [each.lora_request for each in work]
    return client.generate(forms, [each.params for each in work], use_tqdm=False, lora_request=adapters)


def submitted(client: Client, work: list[Work]) -> list[Future[RequestOutput]]:
    return [client.submit(each.form, each.params, lora_request=each.lora_request) for each in work]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options with two adapters."""
    adapters = write_adapters(tmp_path_factory.mktemp("adapters"), DEMO_FOLDER, 2)
    modules = [f"{path.name}={path}" for path in adapters]
    return [*OPTIONS, "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--lora-modules", *modules]


@pytest.fixture(scope="module")
def work(options: list[str]) -> list[Work]:
    """Seeded and greedy requests with grammars, several answers, logprobs and adapters."""
    rng, names = random.Random(7), [module.partition("=")[0] for module in options[-2:]]
    return with_adapters(make_work(rng), names, rng)


@pytest.fixture(scope="module")
def calm(options: list[str], work: list[Work], tmp_path_factory: pytest.TempPathFactory) -> list[RequestOutput]:
    """The answers of an engine with one replica."""
    with Engine(tmp_path_factory.mktemp("one"), options) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            answers = answers_of(client, work)
    assert not without_effect(work, answers)
    return answers


@pytest.fixture(scope="module")
def engine(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from serve(Engine(tmp_path_factory.mktemp("two"), [*options, *LIMITS, "--data-parallel-size", "2"]))


def num_returns(engine: Engine, name: str) -> int:
    """Return how often a process of this name has been replaced and was ready."""
    return engine.errors.read_text(encoding="utf-8").count(f" supervisor: {name} is back\n")


def wait_back(engine: Engine, name: str, count: int) -> None:
    """Wait until `num_returns` has grown to `count`."""
    deadline = time.monotonic() + DEADLINE_S
    while num_returns(engine, name) < count:
        assert time.monotonic() < deadline, f"{name} is not back"
        time.sleep(0.02)


def test_two_replicas_answer_as_one_and_share_the_work(
    engine: Engine, work: list[Work], calm: list[RequestOutput]
) -> None:
    with Client(engine.address) as client:
        before = client.info().num_kv_blocks
        for expected, found in zip(calm, answers_of(client, work), strict=True):
            assert difference(expected, found) is None
        assert before == 2 * 255, "the pools add up"
        times = [sum(engine.child(name).cpu_times()[:2]) for name in ("worker 0", "worker 0 of replica 1")]
        more = [work[i % len(work)] for i in range(24)]
        answers_of(client, more)
        spent = [
            sum(engine.child(name).cpu_times()[:2]) - since
            for name, since in zip(("worker 0", "worker 0 of replica 1"), times, strict=True)
        ]
        assert min(spent) > 0.25 * sum(spent), f"one replica computes nearly all: {spent}"
        deadline = time.monotonic() + DEADLINE_S
        while client.health().num_free_blocks != 2 * 255:
            assert time.monotonic() < deadline, client.health()


def check_loss(
    engine: Engine, work: list[Work], calm: list[RequestOutput], name: str, number: signal.Signals, num_steps: int
) -> None:
    """Signal a process once the engine has done so many steps for the work."""
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        health, count = client.health(), num_returns(engine, name)
        futures = submitted(client, work)
        deadline = time.monotonic() + DEADLINE_S
        while client.health().step < health.step + num_steps:
            assert time.monotonic() < deadline, "no step ends"
        os.kill(engine.child(name).pid, number)
        for expected, future in zip(calm, futures, strict=True):
            assert difference(expected, future.result(timeout=DEADLINE_S)) is None
        if number == signal.SIGSTOP:  # a stopped worker whose replica was idle is noticed by its next step
            for expected, found in zip(calm, answers_of(client, work), strict=True):
                assert difference(expected, found) is None
        wait_back(engine, name, count + 1)
        for expected, found in zip(calm, answers_of(client, work), strict=True):
            assert difference(expected, found) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["core of replica 1", "worker 0"])
def test_a_killed_process_of_a_replica_changes_no_answer(
    engine: Engine, work: list[Work], calm: list[RequestOutput], name: str
) -> None:
    check_loss(engine, work, calm, name, signal.SIGKILL, 20)


@pytest.mark.timeout(120)
def test_orders_are_carried_out_by_all_replicas_and_hold_for_the_workers_that_replace_lost_ones(
    engine: Engine, work: list[Work], calm: list[RequestOutput]
) -> None:
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        client.sleep()
        count = num_returns(engine, "worker 0 of replica 1")
        engine.child("worker 0 of replica 1").kill()
        wait_back(engine, "worker 0 of replica 1", count + 1)
        futures = submitted(client, work)
        step = client.health().step
        assert client.is_sleeping()
        client.wake_up()
        for expected, future in zip(calm, futures, strict=True):
            assert difference(expected, future.result(timeout=DEADLINE_S)) is None
        assert client.health().step > step and not client.is_sleeping()
        client.pause()
        futures = submitted(client, work)
        client.reload(DEMO_FOLDER)
        assert client.reset_prefix_cache() and not any(future.done() for future in futures)
        client.resume()
        for expected, future in zip(calm, futures, strict=True):
            assert difference(expected, future.result(timeout=DEADLINE_S)) is None


def pids(engine: Engine, names: Sequence[str] = PROCESSES) -> list[int]:
    return [engine.child(name).pid for name in names]


@pytest.mark.timeout(120)
def test_a_rolling_restart_replaces_all_processes_and_changes_no_answer(
    engine: Engine, work: list[Work], calm: list[RequestOutput]
) -> None:
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        before, health = pids(engine), client.health()
        futures = [future for _ in range(3) for future in submitted(client, work)]
        client.restart_replicas()
        after = pids(engine)
        assert not set(before) & set(after)
        for expected, future in zip([*calm, *calm, *calm], futures, strict=True):
            assert difference(expected, future.result(timeout=DEADLINE_S)) is None
        client.restart_replicas(1)
        assert [one == other for one, other in zip(after, pids(engine), strict=True)] == [True, False, True, False]
        for expected, found in zip(calm, answers_of(client, work), strict=True):
            assert difference(expected, found) is None
        assert (client.health().num_restarts, client.health().last_failure) == (
            health.num_restarts,
            health.last_failure,
        )
        with pytest.raises(RequestError, match="there is no replica 2: replicas 0, 1 run"):
            client.restart_replicas(2)


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["frontend", "core of replica 1", "worker 0"])
def test_a_process_lost_during_a_rolling_restart_changes_no_answer(
    engine: Engine, work: list[Work], calm: list[RequestOutput], name: str
) -> None:
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        for delay_s in (0.0, 0.3, 1.0):
            before = pids(engine)
            futures = submitted(client, work)
            with ThreadPoolExecutor(1) as pool:
                restart = pool.submit(client.restart_replicas)
                with contextlib.suppress(FutureTimeoutError):
                    restart.result(delay_s)
                engine.child(name).kill()
                restart.result(DEADLINE_S)
            for expected, future in zip(calm, futures, strict=True):
                assert difference(expected, future.result(timeout=DEADLINE_S)) is None
            assert not set(before) & set(pids(engine))


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", PROCESSES)
def test_every_process_may_be_lost_at_any_point(
    engine: Engine, work: list[Work], calm: list[RequestOutput], name: str, number: signal.Signals
) -> None:
    rng = random.Random(f"{name} {number}")
    for _ in range(4):
        check_loss(engine, work, calm, name, number, rng.randrange(1, 150))


def of_grammars(engine: Engine, role: str) -> list[psutil.Process]:
    """Return the processes of this title, at most one of each replica."""
    return [process for process in engine.processes() if process.cmdline()[:1] == [f"tokenloom {role}"]]


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["grammar", "prover"])
@pytest.mark.parametrize("num_stopped", [1, 2])
@pytest.mark.parametrize("is_running", [False, True])
def test_stopped_processes_of_grammars_hold_up_no_other_answer_and_are_replaced(
    engine: Engine, role: str, num_stopped: int, is_running: bool
) -> None:
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
    known, new = (
        plain.replace(structured_outputs={"json": schema | {"description": text}})
        for text in ("known", str(random.random()))
    )
    with Client(engine.address) as client:
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
        others = [client.submit("The", plain) for _ in range(8)]
        for future in others:
            assert difference(calm_plain, future.result(timeout=DEADLINE_S)) is None
        assert all(process.is_running() for process in stopped), "the plain answers waited for their replacement"
        for future in futures:
            assert difference(calm, future.result(timeout=DEADLINE_S / 2)) is None
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        answers = client.generate(["The"] * 8, [known, plain] * 4, use_tqdm=False)
        assert [difference(each, found) for each, found in zip([calm, calm_plain] * 4, answers, strict=True)] == [
            None
        ] * 8


@pytest.fixture(scope="module")
def three(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with three replicas, which may meet requests that kill."""
    more = ["--dp", "3", "--allowed-logits-processors", KILLER]
    yield from serve(Engine(tmp_path_factory.mktemp("three"), [*options, *LIMITS, *more]))


def check_poison(
    engine: Engine, work: list[Work], calm: list[RequestOutput], form: Any, params: SamplingParams, message: str
) -> None:
    """Check that a request is given up after at most three losses, with this message, and that others complete."""
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        before = client.health().num_restarts
        futures = submitted(client, work)
        with pytest.raises(InternalError, match=message) as caught:
            client.submit(form, params, request_id="poison").result(timeout=DEADLINE_S)
        assert re.search("request poison: ", str(caught.value))
        for expected, future in zip(calm, futures, strict=True):
            assert difference(expected, future.result(timeout=DEADLINE_S)) is None
        assert client.health().num_restarts - before <= 3


@pytest.mark.timeout(150)
def test_a_request_that_ends_workers_is_given_up_after_three_losses_and_others_complete(
    three: Engine, work: list[Work], calm: list[RequestOutput]
) -> None:
    poison = SamplingParams(max_tokens=5, logits_processors=[KILLER])
    check_poison(three, work, calm, "The capital of France is", poison, "3 times and was given up; last: worker 0")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("point", ["core.add", "core.admit"])
def test_a_request_that_ends_a_core_before_its_start_is_announced_is_given_up_after_three_losses(
    three: Engine, work: list[Work], calm: list[RequestOutput], point: str
) -> None:
    prompt = [7] * 333  # no other prompt has this length
    fault = three.faults / f"{point}.{len(prompt)}"
    fault.write_text("kill always")
    try:
        check_poison(three, work, calm, prompt, SamplingParams(max_tokens=5), "3 times and was given up; last: core")
    finally:
        fault.unlink()
