"""Whole numbers that clients write as text: in headers, query parameters, paths and keys of JSON."""

from __future__ import annotations

MAX_DIGITS = 18  # so that it fits into 64 bits; Python raises an error for texts of over 4,300 digits


def whole_number(text: str) -> int | None:
    """Return the number that `text` is; None if it is anything but 1 to MAX_DIGITS digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None
