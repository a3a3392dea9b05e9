"""start_profile and stop_profile on whole engines: a trace of each rank, the profiled steps, and aborted profiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tokenloom import LLM, Client, InternalError, RequestError, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, client, serve

__all__ = ["client"]  # fixtures

OPTIONS = ["--num-kv-blocks", "256", "--http", "0", "--tensor-parallel-size", "2"]
PROMPT = [5 + i % 90 for i in range(40)]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NUM_LONG = 30
LONG = SHORT.replace(max_tokens=NUM_LONG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "made" / "at need"


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *OPTIONS, "--profile-dir", str(folder)))


def answer(client: Client, params: SamplingParams = SHORT) -> list[int]:
    return client.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


def take_traces(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read and delete the traces in `folder` and return their events by rank; other files are an error."""
    found = {}
    for path in sorted(folder.iterdir()):
        rank, _, kind = path.name.split(".", 2)
        assert kind == "pt.trace.json" and rank not in found
        found[rank] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        path.unlink()
    return found


def steps(events: list[dict[str, Any]]) -> list[int]:
    names = [str(event["name"]) for event in events if event.get("cat") == "user_annotation"]
    return sorted(int(name.removeprefix("step ")) for name in names if name.startswith("step "))


def has_torch(events: list[dict[str, Any]]) -> bool:
    return any(event["name"].startswith("aten::") for event in events)


def refuse_to_stop(client: Client) -> None:
    with pytest.raises(RequestError, match="no profile is running: start_profile begins one"):
        client.stop_profile()


def test_each_rank_writes_a_trace_of_the_profiled_steps(engine: Engine, client: Client, folder: Path) -> None:
    refuse_to_stop(client)
    expected = answer(client)
    client.start_profile()
    with pytest.raises(RequestError, match="a profile is running already: stop_profile ends it"):
        client.start_profile()
    assert answer(client) == expected
    client.stop_profile()
    assert answer(client) == expected and not client.health().is_paused
    refuse_to_stop(client)
    traces = take_traces(folder)
    assert list(traces) == ["rank-0", "rank-1"] and all(map(has_torch, traces.values()))
    numbers = steps(traces["rank-0"])
    assert numbers == steps(traces["rank-1"]) == list(range(numbers[0], numbers[-1] + 1))
    assert 8 <= len(numbers) <= 9 < numbers[0]  # one more may start before stop_profile arrives; as many ran before
    assert f"profile written to {folder}/rank-1." in engine.log()


def test_profiling_over_http_records_a_running_request_and_keeps_it_running(
    engine: Engine, client: Client, folder: Path
) -> None:
    expected = answer(client, LONG)
    with httpx2.Client(base_url=engine.url, timeout=RECOVERY_S) as http:
        assert http.post("/start_profile").json() == {"profiling": True}
        future = client.submit(PROMPT, LONG)
        assert engine.inject("worker.forward", "delay 0.3", 0, RECOVERY_S)
        assert http.post("/stop_profile").json() == {"profiling": False}
        refused = http.post("/stop_profile")
        assert refused.status_code == 400 and "no profile is running" in refused.json()["error"]["message"]
    assert future.result(RECOVERY_S).outputs[0].token_ids == expected
    assert all(0 < len(steps(events)) < NUM_LONG for events in take_traces(folder).values())


def test_an_unwritable_profile_folder_fails_only_the_profile_call(client: Client, folder: Path) -> None:
    before = client.health().num_restarts
    folder.mkdir(parents=True, exist_ok=True)
    folder.rmdir()
    folder.write_text("in the way", encoding="utf-8")
    with pytest.raises(InternalError, match=r"start_profile failed: worker [01]: FileExistsError"):
        client.start_profile()
    folder.unlink()
    refuse_to_stop(client)
    client.start_profile()
    folder.rmdir()
    with pytest.raises(InternalError, match=r"stop_profile failed: worker [01]: "):
        client.stop_profile()
    refuse_to_stop(client)
    assert client.health().num_restarts == before


@pytest.mark.parametrize("role", [*at_night("core"), "worker 1"])
def test_losing_a_worker_or_the_core_ends_the_profile_but_no_request(
    engine: Engine, client: Client, folder: Path, role: str
) -> None:
    expected = answer(client, LONG)
    client.start_profile()
    future = client.submit(PROMPT, LONG)
    assert engine.inject("worker.forward", "delay 0.3", 0, RECOVERY_S)
    engine.child(role).kill()
    assert future.result(RECOVERY_S).outputs[0].token_ids == expected
    refuse_to_stop(client)
    if role != "core":  # only a core's loss leaves workers that were recording
        return
    assert "the profile ends unwritten" in engine.log()
    client.start_profile()
    answer(client)
    client.stop_profile()
    assert [len(steps(events)) < 20 for events in take_traces(folder).values()] == [True, True]


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_worker_that_dies_during_a_profile_call_fails_the_call(
    engine: Engine, client: Client, is_stopping: bool
) -> None:
    if is_stopping:
        client.start_profile()
    future = client.submit(PROMPT, LONG)
    inject(engine.faults, "worker.profile", "delay 5", 1)
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(client.stop_profile if is_stopping else client.start_profile)
        assert engine.wait_struck("worker.profile", 1, RECOVERY_S)
        engine.child("worker 1").kill()
        with pytest.raises(InternalError, match="_profile failed, no profile is running: the workers ended"):
            order.result(RECOVERY_S)
    assert len(future.result(RECOVERY_S).outputs[0].token_ids) == NUM_LONG
    refuse_to_stop(client)


def test_in_process_the_profile_is_written_into_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with LLM(in_process=True, num_threads=1, device="cpu", num_kv_blocks=64) as llm:
        refuse_to_stop(llm)
        llm.start_profile()
        expected = answer(llm)
        llm.stop_profile()
        (folder,) = tmp_path.glob("tokenloom/*/profiles")
        (events,) = take_traces(folder).values()
        assert has_torch(events) and 8 <= len(steps(events)) <= 9
        assert answer(llm) == expected
