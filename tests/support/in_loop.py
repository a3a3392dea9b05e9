"""Tests that are coroutines: each runs in a loop of its own, within a context that it gets as its first argument."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def in_loop(
    context: Callable[[Path], AbstractAsyncContextManager[T]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Let pytest run a coroutine; `context` gets the test's tmp_path, and the other arguments are fixtures or cases."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def work(tmp_path: Path, arguments: dict[str, Any]) -> None:
            async with context(tmp_path) as entered:
                await test(entered, **arguments)

        _, *names = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(work(arguments["tmp_path"], {name: arguments[name] for name in names}))

        fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in {"tmp_path", *names}]
        run.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return run

    return decorate
