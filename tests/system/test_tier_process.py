"""The loss of the tier process delays no request; with a lost core it ends before the next one starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.chaos_work import Work, answers, check_equal, submit
from tokenloom.tests.system.launched import LaunchedEngine, client, lost, serve

__all__ = ["client"]  # fixtures

OPTIONS = ["--dtype", "float32", "--hang-timeout-s", "1", "--num-kv-blocks", "40", "--kv-host-bytes", "16M"]
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
WORK = [Work(country, f"The capital of {country} is", PARAMS) for country in ("France", "Spain", "Peru", "Mali")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    disk = ["--kv-disk", str(tmp_path_factory.mktemp("blocks"))]
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *OPTIONS, *disk))


@pytest.mark.parametrize(
    ("role", "number", "words"),
    [
        ("tier", signal.SIGKILL, "tier was killed by SIGKILL"),
        ("tier", signal.SIGSTOP, "tier hangs: no sign of life"),
        ("core", signal.SIGKILL, "core was killed by SIGKILL"),
    ],
)
def test_a_lost_process_changes_no_answer_and_the_next_tier_process_serves(
    engine: Engine, client: Client, role: str, number: signal.Signals, words: str
) -> None:
    calm, num_restarts, old = answers(client, WORK), client.health().num_restarts, engine.child("tier")
    futures = submit(client, WORK)
    with lost(engine, role, number):
        check_equal(calm, futures)
    assert words in client.health().last_failure
    assert not psutil.pid_exists(old.pid) and engine.child("tier").pid != old.pid
    assert client.health().num_restarts == num_restarts + 1
