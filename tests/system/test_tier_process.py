"""The loss of the tier process delays no request; with a lost core it ends before the next one starts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.ipc.messages.client import Health
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.chaos_work import difference
from tokenloom.tests.system.launched import serve

RECOVERY_S = 30.0
OPTIONS = [
    "--device",
    "cpu",
    "--num-threads",
    "1",
    "--dtype",
    "float32",
    "--hang-timeout-s",
    "1",
    "--num-kv-blocks",
    "40",
]
PROMPTS = [f"The capital of {country} is" for country in ("France", "Spain", "Peru", "Mali")]
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("blocks")
    options = [*OPTIONS, "--kv-disk", str(folder), "--kv-host-bytes", "16M"]
    yield from serve(Engine(tmp_path_factory.mktemp("run"), options))


def wait_health(client: Client, num_restarts: int) -> Health:
    """Return health once it counts `num_restarts` restarts and the engine serves."""
    deadline = time.monotonic() + RECOVERY_S
    while (health := client.health()).num_restarts < num_restarts or not health.is_ready:
        assert time.monotonic() < deadline, health
        time.sleep(0.02)
    return health


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("role", "number", "words"),
    [
        ("tier", signal.SIGKILL, "tier was killed by SIGKILL"),
        ("tier", signal.SIGSTOP, "tier hangs: no sign of life"),
        ("core", signal.SIGKILL, "core was killed by SIGKILL"),
    ],
)
def test_a_lost_process_changes_no_answer_and_the_next_tier_process_serves(
    engine: Engine, role: str, number: signal.Signals, words: str
) -> None:
    with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
        calm = client.generate(PROMPTS, PARAMS, use_tqdm=False)
        num_restarts = client.health().num_restarts
        old = engine.child("tier")
        futures = [client.submit(prompt, PARAMS) for prompt in PROMPTS]
        engine.child(role).send_signal(number)
        health = wait_health(client, num_restarts + 1)
        assert words in health.last_failure
        for future, expected in zip(futures, calm, strict=True):
            assert difference(expected, future.result(timeout=RECOVERY_S)) is None
        assert not psutil.pid_exists(old.pid)
        assert engine.child("tier").pid != old.pid
        assert client.health().num_restarts == num_restarts + 1
