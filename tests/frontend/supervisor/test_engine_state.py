from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tokenloom.frontend.supervisor.children import Child
from tokenloom.frontend.supervisor.engine_state import EngineState, state_lines
from tokenloom.ipc.messages.supervisor import Progress


def new_child(role: str, name: str, pid: int, *, is_ready: bool) -> Child:
    process = SimpleNamespace(name=name, pid=pid, resident_bytes=lambda: 300 << 20)
    return Child(role, cast(Any, process), b"", is_ready=is_ready)


def new_state(**changes: Any) -> EngineState:
    state = EngineState(
        places=["ipc:///run/engine.sock", "http://127.0.0.1:8000"],
        uptime_s=3 * 3600 + 120.0,
        phase="serving",
        children=[
            new_child("worker", "worker 0", 11, is_ready=False),
            new_child("core", "core", 12, is_ready=True),
        ],
        epochs={"worker": "generation 2", "core": "epoch 0", "frontend": "number 0"},
        progress=Progress(step=812, step_age_s=0.5, num_running=3, num_waiting=1, num_free_blocks=60),
        progress_age_s=1.0,
        num_blocks=81,
        num_restarts={"worker": 2, "core": 0, "frontend": 0},
        last_failure="worker 0 was killed by SIGKILL",
    )
    return state._replace(**changes)


def test_state_lines_name_each_process_the_work_and_the_last_failure() -> None:
    assert state_lines(new_state()) == [
        "state: serving at ipc:///run/engine.sock and http://127.0.0.1:8000, up 3 h 2 min; restarts: 2 of the worker",
        "state: worker 0: pid 11, starting, generation 2, 300 MiB",
        "state: core: pid 12, ready, epoch 0, 300 MiB",
        "state: step 812, 1.5 s ago; 3 running, 1 waiting; KV 25% used",
        "state: last failure: worker 0 was killed by SIGKILL",
    ]


def test_a_starting_engine_has_state_lines_too() -> None:
    progress = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0)
    restarts = {"worker": 0, "core": 0, "frontend": 0}
    state = new_state(
        places=[],
        phase="starting",
        progress=progress,
        num_blocks=0,
        num_restarts=restarts,
        last_failure="",
        uptime_s=4.0,
    )
    assert state_lines(state)[0] == "state: starting, up 4.0 s; restarts: none"
    assert state_lines(state)[-1] == "state: no step has ended yet"
