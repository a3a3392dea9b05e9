from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tokenloom.frontend.launcher.supervisor.children import Child
from tokenloom.frontend.launcher.supervisor.engine_state import EngineState, state_lines
from tokenloom.frontend.launcher.supervisor.launcher import ProcessSpec, Unit
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.messages.supervisor import Progress

FAILURE = "worker 0 was killed by SIGKILL"


def new_child(spec: ProcessSpec, pid: int, *, is_ready: bool) -> Child:
    process = SimpleNamespace(place=f"pid {pid}", resident_bytes=lambda: 300 << 20)
    return Child(spec, cast(Any, process), is_ready=is_ready)


def new_state(**changes: Any) -> EngineState:
    state = EngineState(
        places=["ipc:///run/engine.sock", "http://127.0.0.1:8000"],
        uptime_s=3 * 3600 + 120.0,
        phase="serving",
        children=[
            new_child(ProcessSpec(Unit("worker"), 2, Rank(0, 0)), 11, is_ready=False),
            new_child(ProcessSpec(Unit("core")), 12, is_ready=True),
        ],
        progress=Progress(
            step=812,
            step_age_s=0.5,
            num_running=3,
            num_waiting=1,
            num_blocks=80,
            num_free_blocks=60,
            last_failure=FAILURE,
        ),
        progress_age_s=1.0,
        num_restarts={"worker": 2, "core": 0, "frontend": 0},
    )
    return state._replace(**changes)


def test_state_lines_name_each_process_the_work_and_the_last_failure() -> None:
    assert state_lines(new_state()) == [
        "state: serving at ipc:///run/engine.sock and http://127.0.0.1:8000, up 3 h 2 min; restarts: 2 of the worker",
        "state: worker 0: pid 11, starting, generation 2, 300 MiB",
        "state: core: pid 12, ready, epoch 0, 300 MiB",
        "state: step 812, 1.5 s ago; 3 running, 1 waiting; KV 25% used",
        f"state: last failure: {FAILURE}",
    ]


def test_a_starting_engine_has_state_lines_too() -> None:
    progress = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0)
    restarts = {"worker": 0, "core": 0, "frontend": 0}
    state = new_state(
        places=[],
        phase="starting",
        progress=progress,
        num_restarts=restarts,
        uptime_s=4.0,
    )
    assert state_lines(state)[0] == "state: starting, up 4.0 s; restarts: none"
    assert state_lines(state)[-1] == "state: no step has ended yet"
