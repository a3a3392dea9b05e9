"""NamePattern: a regular expression of adapter_config.json, matched against the paths of modules in bounded time.

PEFT matches the keys of rank_pattern and alpha_pattern with Python's `re`, which may take hours for some patterns. RE2,
from the extra tokenloom[lora], takes time in proportion to the name. Patterns are accepted only in syntax that is
written the same and means the same in both; look-around, back references and rarer syntax are refused.
"""

from __future__ import annotations

import re
from typing import Any

MAX_LENGTH = 500
MAX_BYTES = 1 << 18  # of memory for a pattern: its program, and the states that RE2 keeps of its matches
MAX_STEPS = 1_000_000_000  # ten seconds if RE2 cannot keep states; the largest files of experts need a third of it

SAME_IN_BOTH = re.compile(  # without, for example, `[[:alpha:]]`, `{,3}` and `\Q`
    r"""(?: [^\\\[({]
          | \\(?:[dDsSwW]|[^A-Za-z0-9])
          | \[\^?+\]?+(?:[^\\\[\]]|\\(?:[dDsSwW]|[^A-Za-z0-9]))*+\]
          | \((?:\?:|(?!\?))
          | \{(?!,)
        )*+""",
    re.VERBOSE,
)


class PatternError(ValueError):
    """Error: a pattern is not a supported regular expression, or matches take too many steps. `mend`: the remedy."""

    def __init__(self, reason: str, mend: str = "write plain paths") -> None:
        super().__init__(reason)
        self.mend = mend


class StepBudget:
    """Limit of the steps that all matches together may take; `spend` raises PatternError beyond it."""

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._num_steps = self._left = num_steps

    def spend(self, num_steps: int) -> None:
        self._left -= num_steps
        if self._left < 0:
            raise PatternError(f"matches take more than {self._num_steps} steps")


class NamePattern:
    """A compiled pattern."""

    def __init__(self, text: str) -> None:
        """Compile `text`. PatternError if it is not supported, or RE2 is not installed."""
        if len(text) > MAX_LENGTH:
            raise PatternError(f"it has {len(text)} characters, at most {MAX_LENGTH} are read")
        read = SAME_IN_BOTH.match(text)
        end = 0 if read is None else read.end()
        if end < len(text):
            raise PatternError(f"{text[end : end + 3]!a} in it is not supported")
        _compile(text)  # on its own, so that its groups are known to be closed
        self._compiled = _compile(rf"(?:.*\.)?(?:{text})")

    def matches(self, name: str, budget: StepBudget) -> bool:
        """Return whether the pattern matches the whole `name`, or all characters after one of its dots. PatternError if
        the budget is spent."""
        budget.spend(self._compiled.programsize * (len(name) + 1))
        return self._compiled.fullmatch(name.encode()) is not None


def _compile(text: str) -> Any:
    try:
        import re2  # from the extra tokenloom[lora]: few adapters have such keys
    except ImportError:
        raise PatternError(
            "regular expressions are matched by google-re2, which is not installed",
            "write plain paths, or pip install 'tokenloom[lora]'",
        ) from None
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = MAX_BYTES, False, True
    options.encoding = re2.Options.Encoding.LATIN1  # names are ASCII
    try:
        return re2.compile(text.encode("ascii"), options)
    except UnicodeEncodeError:
        raise PatternError("it has characters that are not ASCII") from None
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise PatternError(reason.partition(": ")[0]) from None
