"""Runs coroutines of the frontend's loop in a test, which brings their replies."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from tokenloom.frontend.server.helpers.task import run
from tokenloom.ipc.errors import TokenloomError

T = TypeVar("T")


def outcomes_of(work: Awaitable[T]) -> list[T | TokenloomError]:
    """Return a list that gets the result of the work or its error, at once or in a later turn."""
    outcomes: list[T | TokenloomError] = []

    async def keep() -> None:
        try:
            outcomes.append(await work)
        except TokenloomError as error:
            outcomes.append(error)

    run(keep())
    return outcomes
