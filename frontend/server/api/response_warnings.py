"""Warnings of the response to one HTTP request: parts of the request that have no effect. They become its `warning`
header, unless the response has begun."""

from __future__ import annotations

from contextvars import ContextVar

_warnings: ContextVar[list[str] | None] = ContextVar("response_warnings", default=None)


def collect_warnings() -> list[str]:
    """Return the list to which warnings of the current request are added from now on."""
    warnings: list[str] = []
    _warnings.set(warnings)
    return warnings


def warn(text: str) -> None:
    """Add a warning to the response to the current request, if there is one, once."""
    warnings = _warnings.get()
    if warnings is not None and text not in warnings:
        warnings.append(text)
