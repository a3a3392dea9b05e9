"""Options that hold several texts, separated by commas."""

from __future__ import annotations


def comma_list(option: str | None) -> list[str]:
    """Return the texts of an option without blanks around them; leave out empty ones. [] for None."""
    return [each for text in (option or "").split(",") if (each := text.strip())]
