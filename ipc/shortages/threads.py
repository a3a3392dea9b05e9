"""Threads that the system may refuse to start: Overloaded is raised, and nothing is kept, so that the caller can
retry."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import Overloaded
from .failure import RETRY_S, TASKS

T = TypeVar("T")


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread and return it; Overloaded if the system refuses one."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise _refusal(name, error) from None
    return thread


class Threads(ThreadPoolExecutor):
    """Thread pool that never runs work that it has refused. The standard library's pool queues work before it starts a
    thread, so that refused work may run later."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        """Run `work` in a thread; return its future. Overloaded if no thread can be started: `work` then never runs."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments, **keywords))
                except BaseException as error:
                    future.set_exception(error)

        try:
            super().submit(run)
        except RuntimeError as error:
            if future.cancel():  # it waits in the queue, and now no thread runs it
                raise _refusal(self._thread_name_prefix or "", error) from None
        return future


def _refusal(name: str, error: RuntimeError) -> Overloaded:
    return Overloaded(f"the thread «{name}» cannot be started: {error}: {TASKS}", RETRY_S)
