"""Faults on purpose, for the tests and the chaos harness: TOKENLOOM_FAULTS=FOLDER.

Code names the points that it passes (`maybe_fail("core.schedule")`). A file of that name in the folder, in a worker
`worker.forward.RANK`, says what shall happen there: `error`, `memory`, `device`, `hang`, or `delay SECONDS`. Whoever
passes next takes the file away, so that each fault strikes once, unless `always` follows. Without the variable a point
costs one comparison.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("TOKENLOOM_FAULTS")
POINTS = (
    *("worker.load", "worker.update rows", "worker.prepare inputs", "worker.forward", "worker.sample", "worker.send"),
    *("worker.reload", "worker.profile"),
    *("core.receive", "core.schedule", "core.send"),
    *("frontend.receive", "frontend.send"),
    "grammar.advance",
    "intake.read",
)
KINDS = ("error", "memory", "device", "hang", "delay")


class InjectedFault(Exception):
    """A fault that somebody asked for."""


class DeviceFault(RuntimeError):
    """What torch says of a GPU that has failed, without a GPU."""


def maybe_fail(point: str, rank: int | None = None) -> None:
    """Do what is asked for at this point, if anything is."""
    if FOLDER is not None:
        _strike(Path(FOLDER), point, point if rank is None else f"{point}.{rank}")


def _strike(folder: Path, point: str, name: str) -> None:
    path = folder / name
    try:
        kind, *words = path.read_text(encoding="utf-8").split()
        if "always" not in words:
            path.unlink()
    except (OSError, ValueError):  # not there, taken by another, without a descriptor, or still being written
        return
    if kind == "delay":
        time.sleep(float(words[0]))
    elif kind == "hang":
        threading.Event().wait()
    elif kind == "memory":
        raise MemoryError(f"injected at {point}")
    elif kind == "device":
        raise DeviceFault(f"CUDA error: an illegal memory access was encountered (injected at {point})")
    else:
        raise InjectedFault(f"injected at {point}")


def inject(folder: Path, point: str, kind: str, rank: int | None = None) -> Path:
    """Ask for a fault; the file is gone once it has struck."""
    if point not in POINTS:
        raise ValueError(f"{point} is no fault point: {', '.join(POINTS)}")
    path = folder / (point if rank is None else f"{point}.{rank}")
    pending = path.with_name(path.name + ".new")
    pending.write_text(kind, encoding="utf-8")
    return pending.rename(path)
