"""A published model with a KV cache of 8 bits answers over HTTP, and goes on after its worker was killed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import httpx2
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.real_model import model_file

TOKEN_BYTES = 30 * 2 * 3 * (64 + 4)  # layers, keys and values, heads, a vector with its scale
KV_BYTES = 1 << 28


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedEngine]:
    options = ["--model", str(model_file()), "--kv-cache-dtype", "int8", "--http", "0", "--max-model-len", "1024"]
    options += ["--deterministic"]  # else an answer that goes on may take another way where two tokens are near
    options += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    with LaunchedEngine(tmp_path_factory.mktemp("e"), *options) as engine:
        engine.wait_ready()
        yield engine
        assert engine.stop() == 0


def test_the_pool_has_room_for_tokens_of_half_the_bytes(engine: LaunchedEngine) -> None:
    metrics = httpx2.get(f"{engine.url}/metrics", timeout=60.0).text
    (line,) = re.findall(r"^tokenloom_cache_config_info{.*$", metrics, flags=re.M)
    assert 'cache_dtype="int8"' in line
    found = re.search(r'num_gpu_blocks="(\d+)"', line)
    assert found is not None and KV_BYTES // (16 * TOKEN_BYTES) - 1 <= int(found[1]) <= KV_BYTES // (16 * TOKEN_BYTES)


def test_a_chat_is_answered(engine: LaunchedEngine) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},  # the model hesitates which language it begins in
    ]
    body = {"messages": messages, "temperature": 0, "continue_final_message": True, "add_generation_prompt": False}
    answer = httpx2.post(f"{engine.url}/v1/chat/completions", json=body | {"max_tokens": 20}, timeout=120.0)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_a_killed_worker_changes_no_answer(engine: LaunchedEngine) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=24, ignore_eos=True)
    with Client(engine.address, reconnect_timeout_s=120) as client:
        calm = "".join(client.stream("The largest planet is", params))
        pieces: list[str] = []
        for piece in client.stream("The largest planet is", params):
            pieces.append(piece)
            if len(pieces) == 8:
                engine.child("worker 0").send_signal(signal.SIGKILL)
    assert "".join(pieces) == calm
