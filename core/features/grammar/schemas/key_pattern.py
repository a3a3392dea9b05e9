"""KeyPatterns: which keys of an object a pattern of `patternProperties` matches, according to the grammar library.

Clients choose both pattern and key, so Python's `re` is not used: some patterns would keep it busy forever, with the
GIL held. The library does not backtrack, and it bounds its own work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_BYTES = LLTokenizer("byte")  # each byte is a token; made once, since it takes twice as long as to compile a schema
_LIMITS = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=20_000, max_lexer_states=10_000)


class KeyPatterns:
    """Owner of the matchers of all patterns so far."""

    def __init__(self) -> None:
        self._start_by_pattern: dict[str, LLMatcher] = {}

    def matches(self, pattern: str, key: str) -> bool | None:
        """Return whether `pattern` matches `key`; None if the library cannot decide: the pattern is invalid or too
        large."""
        start = self._start_by_pattern.get(pattern)
        if start is None:
            schema = {"type": "string", "pattern": pattern}
            start = self._start_by_pattern[pattern] = self._matcher(LLMatcher.grammar_from_json_schema(schema))
        if start.is_error():
            return None
        matcher, text = start.deep_copy(), json.dumps(key, ensure_ascii=False).encode(errors="replace")
        num_taken = matcher.try_consume_tokens(list(text))
        if matcher.is_error():
            return None
        return num_taken == len(text) and matcher.is_accepting()

    def matches_others(self, pattern: str, keys: Iterable[str]) -> bool:
        """Return whether `pattern` matches, or may match, other keys than these."""
        inside = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/").replace("\n", r"\n")
        before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
        known = " | ".join(json.dumps(key, ensure_ascii=False) for key in keys)
        grammar = f"start: KEY\nKEY: /{before}({inside}){after}/ & ~({known})"
        matcher = self._matcher(LLMatcher.grammar_from_lark(grammar))
        matcher.compute_bitmask()
        return not matcher.get_error().startswith("NoExtensionBias")

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(_BYTES, grammar, log_level=0, limits=_LIMITS)
