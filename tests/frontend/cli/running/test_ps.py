"""The table of running engines."""

from __future__ import annotations

from tokenloom.frontend.cli.running.ps import EngineState, ask_all, table
from tokenloom.frontend.launcher.engine_record import EngineRecord
from tokenloom.ipc.messages.client import Health, Info

HEALTH = Health(
    query_id=0,
    is_ready=True,
    is_stalled=False,
    step=9,
    step_age_s=0.1,
    num_running=2,
    num_waiting=1,
    num_free_blocks=30,
)
INFO = Info(
    query_id=0,
    version="1",
    run_id="r",
    model="m",
    max_model_len=8,
    vocab_size=9,
    block_size=16,
    num_kv_blocks=40,
    tensor_parallel_size=1,
    eos_token_ids=[],
)


def test_each_engine_has_a_line_with_its_state_load_and_place() -> None:
    served = EngineRecord(pid=5, model="m", addresses=["ipc:///a"], started_at=40.0, http_address="http://127.0.0.1:1")
    private = EngineRecord(pid=66, model="long-name", addresses=["ipc:///b"], started_at=0.0, is_private=True)
    head, first, second = table([EngineState(served, HEALTH, INFO), EngineState(private)], 100.0)
    assert head.split() == ["MODEL", "STATE", "REQUESTS", "KV", "CACHE", "UP", "PID", "ADDRESS"]
    assert first.split() == ["m", "ready", "2", "+", "1", "waiting", "25%", "1", "min", "5", "http://127.0.0.1:1"]
    assert second.split() == ["long-name", "no", "answer", "1", "min", "66", "ipc:///b", "(of", "a", "program)"]
    assert head.index("ADDRESS") == first.index("http") == second.index("ipc")


def test_an_engine_that_does_not_answer_is_listed_without_a_state() -> None:
    engine = EngineRecord(pid=1, model="m", addresses=["ipc:///nowhere/there.sock"], started_at=0.0)
    assert ask_all([engine], 0.1) == [EngineState(engine)]
    assert ask_all([], 0.1) == []
