"""The effect of each signal on an engine, sent to `engine-launch` or to all of its processes."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

import psutil
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.today import at_night
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import LaunchedEngine

DEADLINE_S = 60.0
PROMPT = "The capital of France is"
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
GROUP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def send_to_children(engine: Engine) -> None:
    for child in engine.processes()[1:]:
        for number in GROUP_SIGNALS:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)


def wait_logged(engine: Engine, pattern: str) -> None:
    wait_until(lambda: re.search(pattern, engine.log(), re.MULTILINE), engine.log, DEADLINE_S)


@pytest.mark.usefixtures("no_ignored_signals")
def test_group_signals_leave_children_alive_and_usr1_logs_the_state_and_hup_drains(tmp_path: Path) -> None:
    with LaunchedEngine(tmp_path, "--log-level", "error", "--speculation", "off") as engine:  # a piece is a token

        def is_ready() -> bool:  # also signals starting children
            send_to_children(engine)
            return engine.process.poll() is not None or any(line.startswith("Ready") for line in engine.lines)

        wait_until(is_ready, timeout_s=DEADLINE_S)
        with Client(engine.wait_ready()) as client:
            stream = client.stream(PROMPT, LONG)
            pieces = [next(stream)]
            send_to_children(engine)
            engine.signal(signal.SIGUSR1)
            for pattern in (
                r"INFO supervisor: state: serving at ipc://.*; restarts: none$",
                r"INFO supervisor: state: worker 0: pid \d+, ready, generation 0, \d+ MiB$",
                r"INFO supervisor: state: frontend: pid \d+, ready",
                r"INFO supervisor: state: (step \d+, .* 1 running|no step has ended yet)",
            ):
                wait_logged(engine, pattern)
            engine.signal(signal.SIGHUP)
            engine.wait_line("Draining")
            pieces += list(stream)
            assert len(pieces) > 100
        assert engine.wait_exit() == 0
        assert "ERROR" not in engine.log()


def test_an_engine_under_nohup_survives_the_end_of_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        engine = LaunchedEngine(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    with engine:
        with Client(engine.wait_ready()) as client:
            engine.signal(signal.SIGHUP)
            engine.signal(signal.SIGUSR1)
            wait_logged(engine, "state: serving")
            assert client.health().is_ready
        assert engine.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, *at_night(signal.SIGTERM)])
def test_a_signal_ends_the_start_at_once_and_sets_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    with LaunchedEngine(tmp_path) as engine:
        engine.child("frontend")
        engine.signal(number)
        assert engine.wait_exit() == 128 + number
        assert not any("workers joined" in line for line in engine.lines), "it has ended the start first"
        errors = engine.log()
        assert errors.count("stopped by a signal while starting") == 1 and "Traceback" not in errors
