"""A suspension of the whole engine is not a hang: no process is replaced and no stream is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.chaos.engine_freezer import How, can_freeze, suspended
from tokenloom.tests.support.chaos_work import check_equal
from tokenloom.tests.system.launched import served

OPTIONS = ["--dtype", "float32", "--http", "0", "--step-timeout-s", "1", "--hang-timeout-s", "2"]
LATE_S = 0.4
DEADLINE_S = 60.0
PROMPT = "The capital of France is"
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
BODY = {"model": "tokenloom-demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 150, "ignore_eos": True}
HOWS = [
    pytest.param("cgroup", marks=pytest.mark.skipif(not can_freeze(), reason="this user may not make cgroups")),
    "signals",
]


engine = served(*OPTIONS)


def http_text(engine: Engine) -> str:
    answer = httpx2.post(f"{engine.url}/v1/completions", json=BODY, timeout=DEADLINE_S)
    text: str = answer.json()["choices"][0]["text"]
    return text


def check_suspensions(engine: Engine, how: How, count: int, seconds: float) -> None:
    """Suspend the engine while library and HTTP streams run; every answer must equal its undisturbed one."""
    with Client(engine.address) as client, ThreadPoolExecutor(2) as pool:
        calm, calm_text = client.generate(PROMPT, LONG, use_tqdm=False)[0], http_text(engine)
        for _ in range(count):
            futures = [client.submit(PROMPT, LONG) for _ in range(2)]
            texts = [pool.submit(http_text, engine) for _ in range(2)]
            processes = engine.processes()
            # the suspension falls within a step that lasts longer
            assert engine.inject("worker.forward", f"delay {seconds + LATE_S:g}", 0, DEADLINE_S)
            with suspended(processes, how), pytest.raises(TimeoutError):
                futures[0].result(timeout=seconds)
            check_equal([calm, calm], futures)
            assert [each.result(timeout=DEADLINE_S) for each in texts] == [calm_text] * 2
            health = client.health()
            assert (health.num_restarts, health.last_failure) == (0, "")


def test_a_suspension_of_three_step_limits_replaces_no_process_and_cuts_no_stream(engine: Engine) -> None:
    check_suspensions(engine, "signals", 1, 3.0)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOWS)
def test_ten_suspensions_of_ten_seconds_replace_no_process_and_cut_no_stream(engine: Engine, how: How) -> None:
    check_suspensions(engine, how, 10, 10.0)
