"""Runs one command of scripts/gpu_check: appends its output to a log, follows its report, stops it at its limit.
Standard library only; knows no stage.

At the limit the command gets an interrupt, on which pytest and the scripts still end their own children; GRACE_S
later it is killed, with all processes that carry its mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE_S = 12.0  # from the interrupt at the limit to the kill: pytest-xdist waits 10 s for its processes
FOLLOW_S = 3.0
MAX_OUTPUT = 20_000  # bytes
MARK = "GPU_CHECK_RUN"


class Ended(NamedTuple):
    """How a command ended. code: None if it was stopped at its limit."""

    code: int | None
    output: str  # the end of it


def run_command(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
    log: Path,
    *,
    grace_s: float = GRACE_S,
    follow: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command and call `follow` every few seconds. Its children end with it, also if this raises, as on an
    interrupt of this process."""
    mark = uuid.uuid4().hex
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_take_interrupts,  # ignored in the background of a shell
        )
        try:
            code = _wait(process, limit_s, follow)
            if code is None:
                process.send_signal(signal.SIGINT)  # on an interrupt pytest still prints the failures
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
        finally:
            kill_marked(mark)
            process.wait()
    with log.open("rb") as written:
        written.seek(max(begin, log.stat().st_size - MAX_OUTPUT))
        return Ended(code, written.read().decode(errors="replace"))


def _wait(process: subprocess.Popen[bytes], limit_s: float, follow: Callable[[], None]) -> int | None:
    """Return the process's exit code, or None at the limit."""
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(FOLLOW_S, left_s))
        follow()
    return None


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_marked(mark: str) -> None:
    """Kill every process that carries this mark in its environment."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
