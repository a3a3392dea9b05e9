"""A text is a whole number only if it is digits, and few enough for 64 bits."""

from __future__ import annotations

import pytest

from tokenloom.ipc.digits import MAX_DIGITS, whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("20", 20), ("9" * MAX_DIGITS, 10**MAX_DIGITS - 1)])
def test_digits_are_a_number(text: str, number: int) -> None:
    assert whole_number(text) == number < 1 << 63


@pytest.mark.parametrize(
    "text", ["", " 1", "+1", "-1", "1_0", "1.0", "0x1", "²", "١", "9" * (MAX_DIGITS + 1), "9" * 5000]
)
def test_other_text_is_none(text: str) -> None:
    assert whole_number(text) is None
