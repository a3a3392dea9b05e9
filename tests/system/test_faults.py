"""Faults injected at named points: a passing fault changes no answer and is named in health; a permanent one reaches
the caller as a typed error that names process, rank, phase, request and cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tokenloom import Client, EngineDead, RequestOutput, SamplingParams
from tokenloom.frontend.launcher.supervisor.local_launcher import SchedStat
from tokenloom.ipc.process.faults import POINTS, maybe_fail
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.chaos_work import Work, answers, check_equal, difference, submit
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import LaunchedEngine, client, lost, reconnecting, served, wait_health

__all__ = ["client"]  # fixtures

STRIKE_S = 20.0
HANG_S = 2
OPTIONS = ["--dtype", "float32", "--step-timeout-s", "1", "--hang-timeout-s", str(HANG_S)]
PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
SCHEMA = SamplingParams(
    temperature=0,
    max_tokens=100,
    structured_outputs={"json": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},  # type: ignore[arg-type]
)
BUDGET = 60
THOUGHTS = SamplingParams(temperature=1, seed=5, max_tokens=100, ignore_eos=True, thinking_token_budget=BUDGET)
TRACE = [300 + i * 7 % 900 for i in range(100)]
REPLAY = SamplingParams(max_tokens=None, trace_decode_token_ids=TRACE)
KINDS = [
    Work("greedy", PROMPT, GREEDY),
    Work("schema", PROMPT, SCHEMA),
    Work("thoughts", f"{PROMPT}<think>", THOUGHTS),
    Work("replay", PROMPT, REPLAY),
]
WORDS = {"error": "InjectedFault", "memory": "MemoryError", "device": "DeviceFault: CUDA error", "hang": "hang"}

OF_A_LENGTH = ("core.add", "core.admit", "frontend.read", "frontend.open")  # struck only by requests of one length
SINGLE = [point for point in POINTS if point.startswith(("core.", "frontend.")) and point not in OF_A_LENGTH]

# Point, kind, rank, and the expected words in health: process and rank, phase, cause.
CASES = [
    ("worker.forward", "memory", 1, r"worker 1 failed in step \d+ \(forward\)"),  # of each day
    ("worker.forward", "hang", 1, r"the workers hang: no step has ended for"),
    *(
        (f"worker.{phase}", kind, rank, rf"worker {rank} failed in step \d+ \({phase}\)")
        for phase in ("update rows", "prepare inputs", "forward", "sample")
        for kind in ("error", "memory", "device")
        for rank in (0, 1)
        if (phase, kind, rank) != ("forward", "memory", 1)
    ),
    *(
        ("worker.send", kind, rank, rf"worker {rank} failed in step \d+ .*worker\.send")
        for kind in ("error", "memory", "device")
        for rank in (0, 1)
    ),
    *((point, kind, None, rf"{point[:4]}.* failed: .*{point}") for point in SINGLE for kind in ("error", "memory")),
]


engine = served(*OPTIONS, "--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def calm(engine: Engine) -> list[RequestOutput]:
    """The answers to KINDS of an engine that loses nothing."""
    with Client(engine.address) as client:
        return answers(client, KINDS)


@pytest.mark.parametrize(("point", "kind", "rank", "words"), some(CASES, 1))
def test_a_passing_fault_changes_no_answer_and_is_named_in_health(
    engine: Engine, client: Client, calm: list[RequestOutput], point: str, kind: str, rank: int | None, words: str
) -> None:
    num_restarts = client.health().num_restarts
    futures = [client.submit(PROMPT, GREEDY) for _ in range(2)]
    assert engine.inject(point, kind, rank, STRIKE_S), f"nobody passed {point}"
    failure = wait_health(client, num_restarts + 1).last_failure
    assert re.search(words, failure) and WORDS[kind] in failure, failure
    check_equal([calm[0]] * 2, futures)


@pytest.mark.parametrize("kind", some(["error", "memory"], 1))
def test_a_fault_in_the_grammar_process_changes_no_answer(
    engine: Engine, client: Client, calm: list[RequestOutput], kind: str
) -> None:
    future = client.submit(PROMPT, SCHEMA)
    assert engine.inject("grammar.advance", kind, None, STRIKE_S)
    check_equal([calm[1]], [future])


def test_plain_answers_go_on_while_the_grammar_process_is_stopped(
    engine: Engine, client: Client, calm: list[RequestOutput]
) -> None:
    stopped = engine.child("grammar")
    structured, stream = client.stream(PROMPT, SCHEMA), client.stream(PROMPT, GREEDY)
    begun, text = next(structured), next(stream)
    stopped.suspend()
    num_before, num_while_stopped = len(text), 0
    for piece in stream:
        text += piece
        if _is_stopped(stopped):  # after 5 s without an answer it is replaced
            num_while_stopped = len(text) - num_before
    assert num_while_stopped > len(text) / 10, "more than the steps that were on their way"
    assert [text, begun + "".join(structured)] == [each.outputs[0].text for each in calm[:2]]


def _is_stopped(process: psutil.Process) -> bool:
    return process.is_running() and process.status() == psutil.STATUS_STOPPED


def test_a_resumed_supervisor_reports_no_process_as_hung(engine: Engine, client: Client) -> None:
    num_restarts, supervisor = client.health().num_restarts, psutil.Process(engine.process.pid)
    for action, seconds in ((supervisor.suspend, 1.5 * HANG_S), (supervisor.resume, HANG_S)):
        action()
        until, pause = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < until:
            client.generate(PROMPT, GREEDY.replace(max_tokens=2), use_tqdm=False)
            pause.wait(0.1)
    assert client.health().num_restarts == num_restarts


def test_waiting_for_a_cpu_differs_from_sleeping() -> None:
    begin, cpu = "print(flush=True)\n", min(os.sched_getaffinity(0))
    programs = [begin + "while True: pass", begin + "while True: pass", begin + "import signal; signal.pause()"]
    processes = [subprocess.Popen([sys.executable, "-c", each], stdout=subprocess.PIPE) for each in programs]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
            os.sched_setaffinity(process.pid, {cpu})
        wait_until(lambda: SchedStat.of(processes[2].pid).state == "S")
        before = [SchedStat.of(process.pid) for process in processes]
        wait_until(lambda: SchedStat.of(processes[0].pid).starved_s(before[0]) >= 0.2)
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


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *some([("frontend", signal.SIGKILL), ("core", signal.SIGKILL)], 1),
        *some([("worker 0", signal.SIGKILL), ("worker 1", signal.SIGKILL), ("worker 1", signal.SIGSTOP)], 1),
    ],
)
def test_answers_of_each_kind_survive_the_loss_of_any_process(
    engine: Engine, client: Client, calm: list[RequestOutput], name: str, number: signal.Signals
) -> None:
    """Also a budget of thoughts, which ends at its token, and the replay of a trace."""
    thoughts, replay = (each.outputs[0] for each in calm[2:])
    assert client.detokenize(thoughts.token_ids[BUDGET:]).startswith("</think>")
    assert "</think>" not in client.detokenize(thoughts.token_ids[:BUDGET])
    assert replay.token_ids == TRACE
    pieces = client.stream(PROMPT, REPLAY)
    text = "".join(next(pieces) for _ in range(5))
    futures = submit(client, KINDS)
    next(client.stream(PROMPT, GREEDY))
    with lost(engine, name, number):
        assert text + "".join(pieces) == replay.text
        check_equal(calm, futures)


def test_a_worker_stopped_while_the_core_restarts_is_replaced(
    engine: Engine, client: Client, calm: list[RequestOutput]
) -> None:
    future = client.submit(PROMPT, GREEDY)
    worker, core = engine.child("worker 1"), engine.child("core")
    worker.suspend()
    core.kill()
    check_equal(calm[:1], [future])
    assert "worker 1 did not answer the core's probe within 1 s" in client.health().last_failure


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_hangs_during_its_start_is_replaced(
    engine: Engine, client: Client, calm: list[RequestOutput], rank: int
) -> None:
    future = client.submit(PROMPT, GREEDY)
    engine.child("worker 0").kill()
    assert engine.inject("worker.load", "hang", rank, STRIKE_S)
    assert difference(calm[0], future.result(timeout=120)) is None
    assert re.search(r"worker \d hangs: no sign of life", client.health().last_failure)


def test_open_requests_go_on_at_an_engine_that_is_started_again_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    work = [Work("greedy", PROMPT, GREEDY), Work("seeded", PROMPT, GREEDY.replace(temperature=0.9, seed=7))]
    with LaunchedEngine(tmp_path, *OPTIONS, "--listen", f"ipc://{tmp_path}/engine.sock") as engine:
        engine.wait_ready()
        with reconnecting(engine) as client:
            calm, futures = answers(client, work), submit(client, work)
            pieces = client.stream(PROMPT, GREEDY)
            text = "".join(next(pieces) for _ in range(5))
            engine.signal(signal.SIGKILL)
            engine.start_again()
            assert text + "".join(pieces) == calm[0].outputs[0].text
            check_equal(calm, futures)


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("point", "rank", "words"), [("core.schedule", None, "core"), ("worker.load", 0, "worker 0")])
def test_an_engine_that_keeps_failing_tells_every_caller_the_cause(
    tmp_path: Path, point: str, rank: int | None, words: str
) -> None:
    with Engine(tmp_path, ["--device", "cpu", "--num-threads", "1", *OPTIONS]) as engine:
        with Client(engine.wait_ready()) as client:
            futures = [client.submit(PROMPT, GREEDY.replace(max_tokens=1500), request_id=f"mine-{i}") for i in range(2)]
            engine.inject(point, "error always", rank, 0.0)
            (engine.faults / (point if rank is None else f"{point}.{rank}")).write_text("error always")
            if rank is not None:
                engine.child("worker 0").kill()
            for i, future in enumerate(futures):
                with pytest.raises(EngineDead) as caught:
                    future.result(timeout=120)
                for word in (f"mine-{i}", words, "InjectedFault", point):
                    assert word in str(caught.value), str(caught.value)
        assert engine.wait_exit() == 1
        assert not engine.leftovers()[1:]  # apart from the fault itself


def test_an_unarmed_fault_point_does_nothing() -> None:
    assert "TOKENLOOM_FAULTS" not in os.environ
    assert not maybe_fail.__code__.co_names, "it calls nothing and reads nothing"
