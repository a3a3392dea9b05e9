"""Requests faults at the fault points of an engine's processes (ipc/process/faults.py)."""

from __future__ import annotations

from pathlib import Path

from tokenloom.ipc.process.faults import POINTS


def inject(folder: Path, point: str, kind: str, rank: int | None = None) -> Path:
    """Request a fault; return its file, which disappears when the fault occurs, unless `kind` ends with "always"."""
    if point not in POINTS:
        raise ValueError(f"{point} is not a fault point: {', '.join(POINTS)}")
    path = folder / (point if rank is None else f"{point}.{rank}")
    pending = path.with_name(path.name + ".new")
    pending.write_text(kind, encoding="utf-8")
    return pending.rename(path)
