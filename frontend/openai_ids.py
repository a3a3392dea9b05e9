"""Ids of answers and of the submits behind them: `cmpl-…` is the answer's, `cmpl-…/3` that of its fourth prompt."""

from __future__ import annotations

import secrets

from ..ipc.errors import RequestError

MAX_CHARACTERS = 200


def answer_id(prefix: str, given: str | None) -> str:
    """A fresh id, or one of the caller's own."""
    if given is None:
        return f"{prefix}-{secrets.token_hex(16)}"
    if not 0 < len(given) <= MAX_CHARACTERS or not given.isprintable() or "/" in given:
        raise RequestError(f"request_id must have 1 to {MAX_CHARACTERS} printable characters other than /")
    return f"{prefix}-{given}"


def submit_ids(request_id: str, count: int) -> list[str]:
    return [request_id] if count == 1 else [f"{request_id}/{position}" for position in range(count)]
