"""A sleeping engine frees its memory and loses no request if a process dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenloom import LLM, Client, InternalError, RequestError, RequestOutput, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.today import at_night, some
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, lost, reconnecting, serve

OPTIONS = ["--max-model-len", "1200", "--num-kv-blocks", "256"]
PROMPT = [5 + i % 90 for i in range(70)]
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
# lower bounds: the checkpoint of 40 MiB; four prompts of 1,000 tokens, 47 MiB, less the heap that loading leaves
WEIGHT_BYTES, KV_BYTES = 30 << 20, 30 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024}
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "one", num_hidden_layers=3, **sizes)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *OPTIONS, "--model", str(folder)))


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with reconnecting(engine) as client:
        yield client
        if client.is_sleeping():  # after a failed test: the others of this file would wait in vain
            client.wake_up()


def resident_bytes(engine: Engine) -> int:
    return int(engine.child("worker 0").memory_info().rss)


def begin(engine: Engine, client: Client) -> tuple[Future[RequestOutput], list[int]]:
    """Submit a request, wait until one of its steps runs, and return it with its expected tokens."""
    expected = client.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids
    client.reset_prefix_cache()
    future = client.submit(PROMPT, LONG)
    assert engine.inject("worker.forward", "delay 0", 0, RECOVERY_S)
    return future, expected


def check(client: Client, future: Future[RequestOutput], expected: list[int]) -> None:
    assert client.is_sleeping() and not future.done()
    client.wake_up()
    assert not client.is_sleeping() and client.health().state == "ready"
    assert future.result(RECOVERY_S).outputs[0].token_ids == expected


@pytest.mark.parametrize("level", [*at_night(1), 2])
def test_sleep_frees_memory_and_requests_wait(engine: Engine, client: Client, level: int) -> None:
    num_restarts = client.health().num_restarts
    client.generate([[7 + i] * 1000 for i in range(4)], LONG.replace(max_tokens=1), use_tqdm=False)
    future, expected = begin(engine, client)
    awake = resident_bytes(engine)
    client.sleep(level)
    asleep = resident_bytes(engine)
    assert awake - asleep > WEIGHT_BYTES + KV_BYTES
    assert (client.health().state, client.health().is_stalled) == ("asleep", False)
    later = client.submit(PROMPT, LONG)
    client.resume()  # does not end the sleep
    client.wake_up(["weights"])
    with_weights = resident_bytes(engine)
    assert with_weights - asleep > WEIGHT_BYTES and awake - with_weights > KV_BYTES and client.is_sleeping()
    check(client, future, expected)
    assert later.result(RECOVERY_S).outputs[0].token_ids == expected
    client.wake_up()  # has no effect
    assert client.health().num_restarts == num_restarts


@pytest.mark.parametrize("role", some(["worker 0", "core", "frontend"], 1))
def test_a_process_killed_during_sleep_is_replaced_asleep(engine: Engine, client: Client, role: str) -> None:
    future, expected = begin(engine, client)
    awake = resident_bytes(engine)
    client.sleep()
    restarts = client.health().num_restarts
    with lost(engine, role):
        pass
    health = client.health()
    assert health.num_restarts > restarts and health.is_ready
    assert awake - resident_bytes(engine) > WEIGHT_BYTES
    check(client, future, expected)


@pytest.mark.parametrize(
    ("role", "is_waking"),
    some([(role, is_waking) for role in ("worker 0", "core", "frontend") for is_waking in (False, True)], 1),
)
def test_a_process_killed_during_a_sleep_or_wake_up_reaches_the_new_state(
    engine: Engine, client: Client, role: str, is_waking: bool
) -> None:
    future, expected = begin(engine, client)
    if is_waking:
        client.sleep()
    inject(engine.faults, "worker.reload", "delay 0.5", 0)
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(client.wake_up if is_waking else client.sleep)
        assert engine.wait_struck("worker.reload", 0, RECOVERY_S)
        engine.child(role).kill()
        change.result(RECOVERY_S)
    if not is_waking:
        assert client.is_sleeping()
        check(client, future, expected)
    assert future.result(RECOVERY_S).outputs[0].token_ids == expected


def test_a_failed_wake_up_leaves_the_engine_asleep(engine: Engine, client: Client, folder: Path) -> None:
    future, expected = begin(engine, client)
    client.sleep()
    moved = (folder / "model.safetensors").rename(folder / "moved")
    try:
        with pytest.raises(InternalError, match="wake_up failed twice and nothing has changed"):
            client.wake_up()
    finally:
        moved.rename(folder / "model.safetensors")
    check(client, future, expected)


def test_an_in_process_engine_sleeps_too(folder: Path) -> None:
    with LLM(folder, in_process=True, num_threads=1, max_model_len=400, device="cpu", num_kv_blocks=64) as llm:
        expected = llm.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids
        future = llm.submit(PROMPT, LONG)
        llm.sleep()
        assert llm.is_sleeping() and not future.done()
        llm.wake_up()
        assert not llm.is_sleeping() and future.result(RECOVERY_S).outputs[0].token_ids == expected
        hit = llm.generate(PROMPT, LONG, use_tqdm=False)[0].num_cached_tokens
        assert llm.reset_prefix_cache() and hit > 0
        assert llm.generate(PROMPT, LONG, use_tqdm=False)[0].num_cached_tokens == 0


def test_bad_levels_and_tags_are_refused(client: Client) -> None:
    for level in (0, 3, "1"):
        with pytest.raises(RequestError, match="level must be 1 or 2"):
            client.sleep(level)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tags must be of weights, kv_cache, got 'wieghts'"):
        client.wake_up(["wieghts"])  # type: ignore[list-item]
