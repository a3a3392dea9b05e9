"""Slices of long work in the event loop, between which sockets are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.002


async def in_slices(items: Iterable[T], slice_s: float = SLICE_S) -> list[T]:
    """Return the items of a lazy iterable; every `slice_s` seconds let other tasks of the event loop run."""
    found, deadline = list[T](), time.monotonic() + slice_s
    for item in items:
        found.append(item)
        if time.monotonic() > deadline:
            await asyncio.sleep(0)
            deadline = time.monotonic() + slice_s
    return found
