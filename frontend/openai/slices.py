"""Long work of a handler in slices, between which the loop looks at its sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.002


async def in_slices(items: Iterable[T]) -> list[T]:
    """All that `items`, which does the work, brings."""
    found, deadline = list[T](), time.monotonic() + SLICE_S
    for item in items:
        found.append(item)
        if time.monotonic() > deadline:
            await asyncio.sleep(0)
            deadline = time.monotonic() + SLICE_S
    return found
