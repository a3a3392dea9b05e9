"""Fault injection for tests and the chaos harness: TOKENLOOM_FAULTS=FOLDER.

Code marks fault points (`maybe_fail("core.schedule")`). A file of that name in the folder contains the fault: `error`,
`memory`, `device`, `hang`, `kill`, `abort`, or `delay SECONDS`. The file's name ends with the rank in a worker
(`worker.forward.RANK`), with the request's number of tokens at core.add, core.admit and frontend.open, and with the
number of bytes at frontend.read. The first process at the point removes the file, so that each fault occurs once;
`always` after the fault keeps the file.
Without the variable, which is read when this module is imported, a fault point is a call that does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

VARIABLE = "TOKENLOOM_FAULTS"
POINTS = (
    *("worker.load", "worker.update rows", "worker.prepare inputs", "worker.forward", "worker.sample", "worker.send"),
    *("worker.reload", "worker.profile", "worker.copy blocks", "worker.fill"),
    *("core.receive", "core.add", "core.admit", "core.schedule", "core.send"),
    *("frontend.receive", "frontend.read", "frontend.open", "frontend.send"),
    "grammar.advance",
    *("tier.receive", "tier.load", "tier.store"),
    "intake.read",
    "adapter.store",
    "media.read",
    *("http.accept", "http.open", "http.read", "http.journal", "http.write", "http.written", "http.adopt"),
)


class InjectedFault(Exception):
    """An injected error."""


class DeviceFault(RuntimeError):
    """Stand-in for torch's error after a GPU fault."""


def _strike(point: str, number: int | None = None) -> None:
    """Cause the fault that the file for this point requests, if it exists. `number`: end of the file's name."""
    path = Path(os.environ[VARIABLE]) / (point if number is None else f"{point}.{number}")
    try:
        kind, *words = path.read_text(encoding="utf-8").split()
        if "always" not in words:
            path.unlink()
    except (OSError, ValueError):  # no file, another process took it, it is incomplete, or no descriptor is free
        return
    if kind == "delay":
        time.sleep(float(words[0]))
    elif kind == "hang":
        threading.Event().wait()
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "abort":
        os.abort()
    elif kind == "memory":
        raise MemoryError(f"injected at {point}")
    elif kind == "device":
        raise DeviceFault(f"CUDA error: an illegal memory access was encountered (injected at {point})")
    else:
        raise InjectedFault(f"injected at {point}")


def _pass(point: str, number: int | None = None) -> None:
    """Do nothing: fault injection is off."""


maybe_fail = _pass
HAS_FAULTS = VARIABLE in os.environ  # for paths on which even a call that does nothing counts
if HAS_FAULTS:
    maybe_fail = _strike
