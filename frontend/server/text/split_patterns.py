r"""Replaces expressions by which published tokenizers split a text, and which take the square of its length, by linear
ones with the same splits.

Each of the three looks from every place to the end of a run: 4,096 digits or blanks took 0.1 to 0.2 s of the loop that
sends everybody's tokens, and 256 Ki an hour of a thread. A run is looked at once, from its begin: a place behind it is
excluded by what is before it. In Oniguruma's syntax `\G` is the end of the match before, and `$` the end of a line.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

LINEAR = {
    # Cohere: groups of three digits from the right
    r"\d{1,3}(?=(?:\d{3})*\b)": r"(?<!\d)\d{1,3}(?=(?:\d{3})*+\b)|\G(?<=\d)\d{3}",
    # SuperBPE: places before them, of which all but the last 255 digits have none
    r"(?=(\d{3})+(?!\d))": r"(?=(?>(?:\d{3}){1,85})(?!\d))",
    # DeepSeek LLM: blanks at the end of a line
    r"\s+$": r"(?<!\s)\s+$",
}


def make_splits_linear(backend: tokenizers.Tokenizer) -> None:
    """Replace the expressions of a tokenizer that are in LINEAR."""
    found: Any = backend.pre_tokenizer
    if found is None:
        return
    given = state = found.__getstate__().decode()
    for slow, linear in LINEAR.items():
        state = state.replace(json.dumps(slow, ensure_ascii=False), json.dumps(linear, ensure_ascii=False))
    if state != given:
        found.__setstate__(state.encode())
        backend.pre_tokenizer = found
