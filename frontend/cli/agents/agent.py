"""Agent: a coding agent that other people make, and how it is set up to use an engine.

A set-up is environment variables and arguments. No file of the user's is read or written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

PATIENCE_MS = 3_600_000  # without a byte of an answer: a CPU computes the first prompt for minutes


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that an agent is to use."""

    url: str  # of its HTTP server, without /v1
    model: str  # the name in requests
    max_model_len: int
    api_key: str | None = None


class SetUp(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an agent use an engine."""

    variables: Mapping[str, str]
    removed: Sequence[str] = ()  # variables that would win over these
    arguments: Sequence[str] = ()  # before those of the user

    def environment(self, of: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with this set-up. `of`: that of this process."""
        kept = {name: value for name, value in of.items() if name not in self.removed}
        return kept | dict(self.variables)

    def lines(self, program: str, rest: Sequence[str], secrets: Mapping[str, str]) -> Iterator[str]:
        """Yield the lines for a shell. `rest`: the user's arguments; `secrets`: values in whose place the lines name
        the shell's variable that holds them → its name."""
        for name in self.removed:
            yield f"unset {name}"
        for name, value in self.variables.items():
            source = secrets.get(value)
            if source is None:
                yield f"export {name}={shlex.quote(value)}"
            elif source != name:
                yield f'export {name}="${source}"'
        yield shlex.join([program, *self.arguments, *rest])


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """A coding agent."""

    name: str
    program: str  # its command
    package: str  # of npm
    num_tokens: int  # of its first request, before a word of the user's: see `measured`
    measured: str  # the version with which `num_tokens` was measured, with the tokenizer of SmolLM2
    set_up: Callable[[Place], SetUp]
