"""Runs one command of scripts/gpu_check: streams its output, follows its report, stops it at its limit. Standard
library only; knows no stage.

At the limit the command gets an interrupt, on which pytest and the scripts still end their own children; GRACE_S
later it is killed, with all processes that carry its mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE_S = 12.0  # from the interrupt at the limit to the kill: pytest-xdist waits 10 s for its processes
FOLLOW_S = 3.0
MAX_LINES = 20_000
MARK = "GPU_CHECK_RUN"


class Ended(NamedTuple):
    """How a command ended. code: None if it was stopped at its limit."""

    code: int | None
    lines: list[str]  # the last of its output


def run_streamed(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    grace_s: float = GRACE_S,
    follow_s: float = FOLLOW_S,
    follow: Callable[[], None] = lambda: None,
    show: Callable[[str], None] = lambda line: print(line, flush=True),
) -> Ended:
    """Run a command and `show` each line of its output as it arrives; call `follow` every `follow_s` seconds.

    Its children end with it, also if this raises, as on an interrupt of this process.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=_take_interrupts,  # ignored in the background of a shell
    )
    is_late, is_over = threading.Event(), threading.Event()

    def interrupt() -> None:
        is_late.set()
        process.send_signal(signal.SIGINT)  # on an interrupt pytest still prints the failures

    def kill() -> None:
        kill_marked(mark)  # children hold the output pipe open, too

    def keep_following() -> None:
        has_ended = False
        while not is_over.wait(follow_s):
            follow()
            if has_ended:  # since the last turn, yet something that it started holds the output open
                kill()
            has_ended = process.poll() is not None

    timers = [threading.Timer(timeout_s, interrupt), threading.Timer(timeout_s + grace_s, kill)]
    follower = threading.Thread(target=keep_following, daemon=True)
    for thread in (*timers, follower):
        thread.start()
    lines: deque[str] = deque(maxlen=MAX_LINES)
    assert process.stdout is not None
    try:
        with process.stdout as output:
            for line in output:
                lines.append(line.rstrip("\n"))
                show(lines[-1])
        code = process.wait()
    finally:
        is_over.set()
        for timer in timers:
            timer.cancel()
        kill_marked(mark)
        process.wait()
        follower.join()
    return Ended(None if is_late.is_set() else code, list(lines))


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
