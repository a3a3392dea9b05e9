"""Options that hold several texts with commas between."""

from __future__ import annotations


def comma_list(option: str | None) -> list[str]:
    """Return the texts of an option without the blanks around them; none for None."""
    return [each for text in (option or "").split(",") if (each := text.strip())]
