"""Faults injected at named points: a passing fault changes no answer and is named in health; a permanent one reaches
the caller as a typed error that names process, rank, phase, request and cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from tokenloom import Client, EngineDead, InternalError, SamplingParams
from tokenloom.frontend.client.open_request import Update
from tokenloom.frontend.client.zmq_transport import ZmqTransport
from tokenloom.frontend.supervisor.local_launcher import SchedStat
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.client import Accepted, Delta, Health, Submit
from tokenloom.ipc.process.faults import POINTS, maybe_fail
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.chaos_work import difference
from tokenloom.tests.system.launched import serve

RECOVERY_S = 30.0
STRIKE_S = 20.0
HANG_S = 2
OPTIONS = [
    "--device",
    "cpu",
    "--num-threads",
    "1",
    "--dtype",
    "float32",
    "--step-timeout-s",
    "1",
    "--hang-timeout-s",
    str(HANG_S),
]
PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)
SCHEMA = SamplingParams(
    temperature=0,
    max_tokens=100,
    structured_outputs={"json": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},  # type: ignore[arg-type]
)
WORDS = {"error": "InjectedFault", "memory": "MemoryError", "device": "DeviceFault: CUDA error", "hang": "hang"}

OF_A_LENGTH = ("core.add", "core.admit", "frontend.read", "frontend.open")  # struck only by requests of one length
SINGLE = [point for point in POINTS if point.startswith(("core.", "frontend.")) and point not in OF_A_LENGTH]

# Point, kind, rank, and the expected words in health: process and rank, phase, cause.
CASES = [
    ("worker.forward", "memory", 1, r"worker 1 failed in step \d+ \(forward\)"),
    ("core.schedule", "error", None, r"core failed: .*core\.schedule"),
    ("frontend.receive", "memory", None, r"frontend failed: .*frontend\.receive"),
]
SLOW_CASES = [
    ("worker.forward", "hang", 1, r"the workers hang: no step has ended for"),
    *(
        (f"worker.{phase}", kind, rank, rf"worker {rank} failed in step \d+ \({phase}\)")
        for phase in ("update rows", "prepare inputs", "forward", "sample")
        for kind in ("error", "memory", "device")
        for rank in (0, 1)
    ),
    *(
        ("worker.send", kind, rank, rf"worker {rank} failed in step \d+ .*worker\.send")
        for kind in ("error", "memory", "device")
        for rank in (0, 1)
    ),
    *((point, kind, None, rf"{point[:4]}.* failed: .*{point}") for point in SINGLE for kind in ("error", "memory")),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start an engine with two ranks."""
    yield from serve(Engine(tmp_path_factory.mktemp("run"), [*OPTIONS, "--tensor-parallel-size", "2"]))


def wait_health(client: Client, num_restarts: int) -> Health:
    """Return health once it counts `num_restarts` restarts and the engine serves again."""
    deadline = time.monotonic() + RECOVERY_S
    while (health := client.health()).num_restarts < num_restarts or not health.is_ready:
        assert time.monotonic() < deadline, health
        time.sleep(0.02)
    return health


def check_fault(engine: Engine, point: str, kind: str, rank: int | None, words: str) -> None:
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        calm = client.generate([PROMPT] * 2, GREEDY, use_tqdm=False)
        num_restarts = client.health().num_restarts
        futures = [client.submit(PROMPT, GREEDY) for _ in range(2)]
        assert engine.inject(point, kind, rank, STRIKE_S), f"nobody passed {point}"
        health = wait_health(client, num_restarts + 1)
        assert re.search(words, health.last_failure), health.last_failure
        assert WORDS[kind] in health.last_failure
        for future, expected in zip(futures, calm, strict=True):
            assert difference(expected, future.result(timeout=RECOVERY_S)) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("point", "kind", "rank", "words"), CASES)
def test_a_passing_fault_changes_no_answer_and_is_named_in_health(
    engine: Engine, point: str, kind: str, rank: int | None, words: str
) -> None:
    check_fault(engine, point, kind, rank, words)


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("point", "kind", "rank", "words"), SLOW_CASES)
def test_every_kind_of_fault_at_every_point_of_every_rank(
    engine: Engine, point: str, kind: str, rank: int | None, words: str
) -> None:
    check_fault(engine, point, kind, rank, words)


def test_a_fault_in_the_grammar_process_changes_no_answer(engine: Engine) -> None:
    with Client(engine.address) as client:
        calm = client.generate(PROMPT, SCHEMA, use_tqdm=False)[0]
        for kind in ("error", "memory"):
            future = client.submit(PROMPT, SCHEMA)
            assert engine.inject("grammar.advance", kind, None, STRIKE_S)
            assert difference(calm, future.result(timeout=RECOVERY_S)) is None


@pytest.mark.timeout(120)
def test_plain_answers_go_on_while_the_grammar_process_is_stopped(engine: Engine) -> None:
    with Client(engine.address) as client:
        calm, calm_plain = (client.generate(PROMPT, each, use_tqdm=False)[0] for each in (SCHEMA, GREEDY))
        stopped = engine.find("grammar")
        assert stopped is not None
        structured, stream = client.stream(PROMPT, SCHEMA), client.stream(PROMPT, GREEDY)
        begun, text = next(structured), next(stream)
        stopped.suspend()
        text += "".join(stream)
        assert stopped.status() == psutil.STATUS_STOPPED, "it is replaced before the plain answer ends"
        assert text == calm_plain.outputs[0].text
        assert begun + "".join(structured) == calm.outputs[0].text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_killing_or_stopping_any_rank_changes_no_answer(engine: Engine, number: signal.Signals) -> None:
    with Client(engine.address) as client:
        calm = client.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        num_restarts = client.health().num_restarts
        future = client.submit(PROMPT, GREEDY)
        engine.inject("worker.forward", "delay 0", 1, STRIKE_S)  # the request is running
        process = engine.find("worker 1")
        assert process is not None
        process.send_signal(number)
        wait_health(client, num_restarts + 1)
        assert difference(calm, future.result(timeout=RECOVERY_S)) is None


@pytest.mark.timeout(120)
def test_a_resumed_supervisor_reports_no_process_as_hung(engine: Engine) -> None:
    with Client(engine.address) as client:
        num_restarts = client.health().num_restarts
        stream = client.stream(PROMPT, GREEDY.replace(max_tokens=1900))
        supervisor, until = psutil.Process(engine.process.pid), time.monotonic() + 1.5 * HANG_S
        supervisor.suspend()
        while time.monotonic() < until:
            stream = stream if next(stream, None) is not None else client.stream(PROMPT, GREEDY)
        supervisor.resume()
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            stream = stream if next(stream, None) is not None else client.stream(PROMPT, GREEDY)
        stream.close()
        assert client.health().num_restarts == num_restarts


def test_waiting_for_a_cpu_differs_from_sleeping() -> None:
    command = [sys.executable, "-c", "import time\nprint(flush=True)\nwhile True: time.sleep(%g)"]
    cpu = min(os.sched_getaffinity(0))
    processes = [subprocess.Popen([*command[:-1], command[-1] % s], stdout=subprocess.PIPE) for s in (0, 0, 100)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
            os.sched_setaffinity(process.pid, {cpu})
        before, deadline = [SchedStat.of(process.pid) for process in processes], time.monotonic() + 20
        while SchedStat.of(processes[0].pid).starved_s(before[0]) < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert SchedStat.of(processes[2].pid).starved_s(before[2]) < 0.05
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("state", "ran_s", "waited_s", "starved_s"),
    [
        ("R", 0.0, 0.0, 3.0),  # runnable without a CPU so far: the kernel counts the wait only when it ends
        ("D", 0.0, 0.1, 3.0),  # waits for a slow disk
        ("R", 2.5, 0.5, 0.5),  # busy loop
        ("S", 0.0, 0.2, 0.2),
        ("T", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_a_runnable_process_without_a_cpu_counts_as_starved(
    state: str, ran_s: float, waited_s: float, starved_s: float
) -> None:
    before = SchedStat(100.0, "S", 7.0, 9.0)
    assert SchedStat(103.0, state, 7.0 + ran_s, 9.0 + waited_s).starved_s(before) == pytest.approx(starved_s)


def test_a_stopped_process_does_not_count_as_starved() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        process.send_signal(signal.SIGSTOP)
        before, deadline = SchedStat.of(process.pid), time.monotonic() + 20
        while SchedStat.of(process.pid).state != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert SchedStat.of(process.pid).starved_s(before) < 1
        process.kill()


@pytest.mark.timeout(120)
def test_unseeded_answers_keep_their_seed_when_the_frontend_is_replaced(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=300, ignore_eos=True, n=2)
    transport = ZmqTransport(engine.address, reconnect_timeout_s=RECOVERY_S)
    try:
        updates: SimpleQueue[Update] = SimpleQueue()
        transport.submit(Submit(request_id="unseeded", params=params, prompt=PROMPT), updates.put)
        tokens: list[list[int]] = [[], []]
        seeds, num_finished, was_killed = list[int](), 0, False
        while num_finished < 2:
            update = updates.get(timeout=RECOVERY_S)
            if isinstance(update, Accepted):
                seeds.append(update.seed)
                continue
            assert isinstance(update, Delta), update
            assert update.start == len(tokens[update.index]), "a token is missing or repeated"
            tokens[update.index] += decode_ids(update.token_ids)
            num_finished += update.finish_reason is not None
            if min(map(len, tokens)) > 5 and not was_killed:
                was_killed = True
                process = engine.find("frontend")
                assert process is not None
                process.kill()
    finally:
        transport.close()
    assert len(seeds) == 2 and seeds[0] == seeds[1]
    with Client(engine.address) as client:
        seeded = client.generate(PROMPT, params.replace(seed=seeds[0]), use_tqdm=False)[0]
    assert [answer.token_ids for answer in seeded.outputs] == tokens


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["frontend", "core", "worker 0"])
def test_a_thinking_budget_survives_the_loss_of_any_process(engine: Engine, name: str) -> None:
    budget = 100
    params = SamplingParams(temperature=1, seed=5, max_tokens=160, ignore_eos=True, thinking_token_budget=budget)
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        prompt = "The capital of France is<think>"
        (calm,) = client.generate([prompt], params, use_tqdm=False)
        tokens = calm.outputs[0].token_ids
        assert client.detokenize(tokens[budget:]).startswith("</think>")
        assert "</think>" not in client.detokenize(tokens[:budget])
        num_restarts = client.health().num_restarts
        pieces = client.stream(prompt, params)
        text = "".join(next(pieces) for _ in range(10))
        process = engine.find(name)
        assert process is not None
        process.kill()
        assert text + "".join(pieces) == calm.outputs[0].text
        wait_health(client, num_restarts + 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["frontend", "core", "worker 0"])
def test_a_replayed_answer_survives_the_loss_of_any_process(engine: Engine, name: str) -> None:
    trace = [300 + i * 7 % 900 for i in range(160)]
    params = SamplingParams(max_tokens=None, trace_decode_token_ids=trace)
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        num_restarts, expected = client.health().num_restarts, client.detokenize(trace)
        pieces = client.stream(PROMPT, params)
        text = "".join(next(pieces) for _ in range(10))
        process = engine.find(name)
        assert process is not None
        process.kill()
        assert text + "".join(pieces) == expected
        wait_health(client, num_restarts + 1)


@pytest.mark.timeout(120)
def test_a_worker_stopped_while_the_core_restarts_is_replaced(engine: Engine) -> None:
    with Client(engine.address) as client:
        calm = client.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        future = client.submit(PROMPT, GREEDY)
        worker, core = engine.find("worker 1"), engine.find("core")
        assert worker is not None and core is not None
        worker.suspend()
        core.kill()
        assert difference(calm, future.result(timeout=RECOVERY_S)) is None
        assert "worker 1 did not answer the core's probe within 1 s" in client.health().last_failure


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_hangs_during_its_start_is_replaced(engine: Engine, rank: int) -> None:
    with Client(engine.address) as client:
        calm = client.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        future = client.submit(PROMPT, GREEDY)
        process = engine.find("worker 0")
        assert process is not None
        process.kill()
        assert engine.inject("worker.load", "hang", rank, STRIKE_S)
        assert difference(calm, future.result(timeout=120)) is None
        assert re.search(r"worker \d hangs: no sign of life", client.health().last_failure)


@pytest.mark.timeout(120)
def test_a_poison_request_gets_the_failures_place_and_cause_and_others_succeed(tmp_path: Path) -> None:
    with Engine(tmp_path, OPTIONS) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            path = engine.faults / "worker.sample.0"
            path.write_text("memory always")
            with pytest.raises(InternalError) as caught:
                client.submit(PROMPT, GREEDY, request_id="poison").result(timeout=60)
            path.unlink()
            expected = r"request poison: .* 3 times .* worker 0 failed in step 1 \(sample\): MemoryError: injected"
            assert re.search(expected, str(caught.value)), str(caught.value)
            assert client.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished


@pytest.mark.timeout(120)
def test_open_requests_go_on_at_an_engine_that_is_started_again_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    with Engine(tmp_path, [*OPTIONS, "--listen", f"ipc://{tmp_path}/engine.sock"]) as engine:
        engine.wait_ready()
        with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
            kinds = (GREEDY, GREEDY.replace(temperature=0.9, seed=7))
            calm = [client.generate(PROMPT, params, use_tqdm=False)[0] for params in kinds]
            futures = [client.submit(PROMPT, params) for params in kinds]
            pieces = list[str]()
            for piece in client.stream(PROMPT, GREEDY):
                pieces.append(piece)
                if len(pieces) == 5:
                    engine.signal(signal.SIGKILL)
                    engine.start_again()
            assert "".join(pieces) == calm[0].outputs[0].text
            for expected, future in zip(calm, futures, strict=True):
                assert difference(expected, future.result(timeout=RECOVERY_S)) is None


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("point", "rank", "words"), [("core.schedule", None, "core"), ("worker.load", 0, "worker 0")])
def test_an_engine_that_keeps_failing_tells_every_caller_the_cause(
    tmp_path: Path, point: str, rank: int | None, words: str
) -> None:
    with Engine(tmp_path, OPTIONS) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            futures = [client.submit(PROMPT, GREEDY.replace(max_tokens=1500), request_id=f"mine-{i}") for i in range(2)]
            engine.inject(point, "error always", rank, 0.0)
            (engine.faults / (point if rank is None else f"{point}.{rank}")).write_text("error always")
            if rank is not None:
                process = engine.find("worker 0")
                assert process is not None
                process.kill()
            for i, future in enumerate(futures):
                with pytest.raises(EngineDead) as caught:
                    future.result(timeout=120)
                for word in (f"mine-{i}", words, "InjectedFault", point):
                    assert word in str(caught.value), str(caught.value)
        assert engine.process.wait(20) == 1
        assert not engine.leftovers()[1:]  # apart from the fault itself


def test_an_unarmed_fault_point_costs_almost_nothing() -> None:
    assert "TOKENLOOM_FAULTS" not in os.environ
    begun = time.process_time()
    for _ in range(100_000):
        maybe_fail("worker.forward", 0)
    assert time.process_time() - begun < 0.1
