"""new_task: starts a task that lives until it ends. A loop itself holds its tasks weakly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_tasks: set[asyncio.Task[Any]] = set()


def new_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run `work` in a task of the running loop."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task
