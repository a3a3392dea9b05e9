"""Liveness: dead clients, deadlines, and an engine whose core is stopped."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tokenloom import Client, SamplingParams
from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.chaos_work import difference
from tokenloom.tests.system.launched import serve

OPTIONS = ["--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--hang-timeout-s", "60"]
PROGRESS_S = 0.75  # the core reports every 0.5 s
DEADLINE_S = 30.0
PROMPT = "The capital of France is"
LONG = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
PROGRAM = """
import sys
from tokenloom import Client, SamplingParams
client = Client(sys.argv[1])
pieces = []
for piece in client.stream("The capital of France is", SamplingParams(temperature=0, max_tokens=int(sys.argv[2]),
                           ignore_eos=True)):
    pieces.append(piece)
    print(len(pieces), flush=True)
print("".join(pieces).encode().hex(), flush=True)
client.close()
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from serve(Engine(tmp_path_factory.mktemp("run"), OPTIONS))


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.address) as client:
        yield client


def start_program(engine: Engine, max_tokens: int) -> subprocess.Popen[str]:
    """Start a client process and wait for its first piece."""
    command = [sys.executable, "-P", "-c", PROGRAM, engine.address, str(max_tokens)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
    assert program.stdout is not None and program.stdout.readline() == "1\n"
    return program


def wait_idle(client: Client) -> None:
    """Wait until no request runs and no block is held."""
    num_blocks, deadline = client.info().num_kv_blocks, time.monotonic() + DEADLINE_S
    while (health := client.health()).num_running or health.num_free_blocks != num_blocks:
        assert time.monotonic() < deadline, health
        time.sleep(0.01)


def has_ended_requests(engine: Engine, cause: str) -> bool:
    """Whether the log says that the request of one client was ended for this cause."""
    return f"a client is {cause}: its 1 requests were ended" in (engine.runtime / "stderr").read_text()


def test_a_killed_clients_requests_end_within_its_lease(engine: Engine, client: Client) -> None:
    wait_idle(client)
    with start_program(engine, 1800) as program:
        program.kill()
        begun = time.monotonic()
        wait_idle(client)
        assert time.monotonic() - begun <= LEASE_S + PROGRESS_S
    while not has_ended_requests(engine, "gone (its connection has ended)"):
        assert time.monotonic() < begun + DEADLINE_S  # the supervisor writes the line later than the event
        time.sleep(0.01)


@pytest.mark.parametrize("pause_s", [LEASE_S / 3, pytest.param(LEASE_S * 1.5, marks=pytest.mark.nightly)])
def test_a_returning_client_continues_its_request(engine: Engine, client: Client, pause_s: float) -> None:
    """Within its lease its request keeps running; later the client submits it again with the received tokens."""
    params, is_late = LONG.replace(max_tokens=400), pause_s > LEASE_S
    calm = client.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    with start_program(engine, 400) as program:
        program.send_signal(signal.SIGSTOP)
        if is_late:  # the answer must outlast the lease
            assert engine.inject("worker.forward", f"delay {LEASE_S + 1:g}", 0, DEADLINE_S)
        time.sleep(pause_s)
        program.send_signal(signal.SIGCONT)
        words, _ = program.communicate(timeout=DEADLINE_S)
    assert bytes.fromhex(words.splitlines()[-1]).decode() == calm
    assert has_ended_requests(engine, f"silent (no message within {LEASE_S:g} s)") == is_late


def test_a_deadline_is_exceeded_by_at_most_a_step(client: Client) -> None:
    overshoots, gaps = [], []
    for timeout_s in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35):
        future = client.submit(PROMPT, LONG.replace(timeout_s=timeout_s))
        pieces = [time.monotonic() for _ in client.stream(PROMPT, LONG.replace(timeout_s=timeout_s))]
        output = future.result(timeout=DEADLINE_S)
        assert output.outputs[0].finish_reason == "timeout"
        overshoots.append(output.metrics.finished_time - output.metrics.arrival_time - timeout_s)
        gaps += [later - earlier for earlier, later in pairwise(pieces)]
    assert min(overshoots) >= 0
    assert statistics.median(overshoots) <= max(gaps) + 0.005
    wait_idle(client)


def test_an_abort_is_confirmed_frees_blocks_and_is_idempotent(client: Client) -> None:
    future = client.submit(PROMPT, LONG, request_id="mine")
    other = client.submit(PROMPT, LONG.replace(max_tokens=100))
    begun = time.monotonic()
    client.abort("mine")
    client.abort("mine")
    assert future.result(timeout=DEADLINE_S).outputs[0].finish_reason == "abort"
    assert time.monotonic() - begun < 1.0
    assert len(other.result(timeout=DEADLINE_S).outputs[0].token_ids) == 100
    client.abort("mine")
    wait_idle(client)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_health_reports_a_stopped_core_as_stalled(engine: Engine, client: Client) -> None:
    calm = client.generate(PROMPT, LONG, use_tqdm=False)[0]
    core = engine.find("core")
    assert core is not None
    future = client.submit(PROMPT, LONG)
    deadline = time.monotonic() + DEADLINE_S
    while not client.health().num_running:
        assert time.monotonic() < deadline
    core.suspend()
    try:
        ages = []
        while not (health := client.health()).is_stalled:
            assert time.monotonic() < deadline and not future.done()
            ages.append(health.step_age_s)
            time.sleep(0.1)
        assert ages == sorted(ages) and health.step_age_s > 9
    finally:
        core.resume()
    assert difference(calm, future.result(timeout=DEADLINE_S)) is None
    assert client.health().num_restarts == 0
