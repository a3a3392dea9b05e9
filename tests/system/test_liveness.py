"""Liveness: clients that are killed, and those that return."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tokenloom import Client, SamplingParams
from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.chaos_work import check_equal
from tokenloom.tests.support.today import at_night
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import served

OPTIONS = ["--dtype", "float32", "--hang-timeout-s", "60"]
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


engine = served(*OPTIONS)


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


def wait_idle(client: Client, within_s: float = DEADLINE_S) -> None:
    """Wait until no request runs and no block is held."""
    num_blocks = client.info().num_kv_blocks

    def is_idle() -> bool:
        health = client.health()
        return not health.num_running and health.num_free_blocks == num_blocks

    wait_until(is_idle, client.health, within_s)


def of_ended_requests(cause: str) -> str:
    """Return the line of the log that says that the request of one client was ended for this cause."""
    return f"a client is {cause}: its 1 requests were ended"


def test_a_killed_clients_requests_end_within_its_lease(engine: Engine, client: Client) -> None:
    wait_idle(client)
    with start_program(engine, 1800) as program:
        program.kill()
        wait_idle(client, LEASE_S + PROGRESS_S)
    engine.wait_log(of_ended_requests("gone (its connection has ended)"))


@pytest.mark.parametrize("pause_s", [LEASE_S / 3, *at_night(LEASE_S * 1.5)])
def test_a_returning_client_continues_its_request(engine: Engine, client: Client, pause_s: float) -> None:
    """Within its lease its request keeps running; later the client submits it again with the received tokens."""
    params, is_late = LONG.replace(max_tokens=400), pause_s > LEASE_S
    calm = client.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    with start_program(engine, 400) as program:
        program.send_signal(signal.SIGSTOP)
        if is_late:  # the answer must outlast the lease
            assert engine.inject("worker.forward", f"delay {LEASE_S + 1:g}", 0, DEADLINE_S)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(pause_s)
        program.send_signal(signal.SIGCONT)
        words, _ = program.communicate(timeout=DEADLINE_S)
    assert bytes.fromhex(words.splitlines()[-1]).decode() == calm
    assert (of_ended_requests(f"silent (no message within {LEASE_S:g} s)") in engine.log()) == is_late


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_health_reports_a_stopped_core_as_stalled(engine: Engine, client: Client) -> None:
    calm, core = client.generate(PROMPT, LONG, use_tqdm=False), engine.child("core")
    future = client.submit(PROMPT, LONG)
    wait_until(lambda: client.health().num_running)
    core.suspend()
    try:
        ages = [0.0]

        def is_stalled() -> bool:
            health = client.health()
            ages.append(health.step_age_s)
            return health.is_stalled or future.done()

        wait_until(is_stalled, timeout_s=DEADLINE_S)
        assert ages == sorted(ages) and ages[-1] > 9 and not future.done()
    finally:
        core.resume()
    check_equal(calm, [future])
    assert client.health().num_restarts == 0
