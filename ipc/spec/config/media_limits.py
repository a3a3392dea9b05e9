"""The numbers of media that --limit-mm-per-prompt allows in a prompt."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError

MEDIA_KINDS = ("image", "video", "audio")  # that --limit-mm-per-prompt may name, as in vLLM


def media_limits(given: dict[str, Any] | None) -> dict[str, int]:
    """Return how many media of each kind --limit-mm-per-prompt allows in a prompt, by kind; ConfigError if invalid.

    A limit is a number, or vLLM's {"count": number, …}; its other fields only estimate sizes. A kind without a limit is
    left out.
    """
    limits = {}
    for kind, limit in (given or {}).items():
        if kind not in MEDIA_KINDS:
            raise ConfigError(f"--limit-mm-per-prompt {kind!r:.80} must be one of {', '.join(MEDIA_KINDS)}")
        count = limit.get("count") if isinstance(limit, dict) else limit
        if isinstance(limit, dict) and count is None:
            continue
        if type(count) is not int or not 0 <= count <= 1 << 20:
            raise ConfigError(f"--limit-mm-per-prompt {kind} must be in [0, {1 << 20}], got {limit!r:.80}")
        limits[kind] = count
    return limits
