"""Split the text of one answer of a chat into reasoning, content and tool calls, delta by delta."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping

import msgspec

from ....ipc.codec import JsonObject, num_ids
from ....ipc.messages.client import Delta
from ..answer_forms.form import AnswerForm
from ..parsers.custom import CustomCalls
from ..parsers.forced import ForcedParser
from ..parsers.names import new_parsers
from ..parsers.parts import Arguments, CallBegin, CallEnd, CallJoiner, Content, Parser, Part, Thought, parsed
from .unparsed import UnparsedCall, UnparsedFinder, telling_marker


class AnswerStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for reading the answers of one request."""

    form: AnswerForm  # without calls for a request without tools
    schemas: Mapping[str, JsonObject]  # name of a tool → schema of its arguments
    is_forced: bool  # a constraint allows only calls, after reasoning at most
    is_in_form: bool = False  # forced calls are in the form, not a JSON list
    is_text: bool = False  # the forced call consists of a custom tool's input
    custom_names: frozenset[str] = frozenset()  # names of custom tools
    forced_name: str | None
    is_inside_thought: bool  # the answer starts inside reasoning
    may_think: bool = False  # the answer may start with reasoning
    max_calls: int | None  # 1 without parallel calls; further calls are dropped. None: no limit

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the parsers look for."""
        return tuple(marker for parser in self.new_parsers() for marker in parser.markers)

    @property
    def call_marker(self) -> str:
        """The text that begins calls; empty if none does, or if the answer is forced to be calls."""
        if self.is_forced or not self.form.calls:
            return ""
        return telling_marker(self.form.calls[0].start)

    def new_parsers(self) -> list[Parser]:
        if not self.is_forced or self.is_in_form:
            return new_parsers(self.form, self.schemas, is_inside_thought=self.is_inside_thought)
        parsers: list[Parser] = []
        if (self.is_inside_thought or self.may_think) and self.form.thought is not None:
            form = AnswerForm(thought=self.form.thought, spaces=self.form.spaces)
            parsers = new_parsers(form, {}, is_inside_thought=self.is_inside_thought)
        return [*parsers, ForcedParser(self.forced_name)]


def random_digits(position: int) -> str:
    """Return 24 random digits (base 16)."""
    return secrets.token_hex(12)


class AnswerText:
    """Reader of one answer: passes its text through the parsers, and counts tool calls and reasoning tokens."""

    def __init__(
        self,
        style: AnswerStyle,
        on_unparsed: Callable[[UnparsedCall], None] = lambda call: None,
        digits: Callable[[int], str] = random_digits,
    ) -> None:
        """`on_unparsed` gets a call that the answer holds and that was not read, once, at its end. `digits` returns 24
        digits (base 16) for the id of the call at a position, where the model wrote none."""
        self._style = style
        self._on_unparsed, self._digits = on_unparsed, digits
        self._unparsed = UnparsedFinder(style.call_marker)
        self._parsers = style.new_parsers()
        self._custom_calls = CustomCalls(style.custom_names, is_text=style.is_text)
        self._call_ids = set[str]()  # of the calls so far
        self._is_dropping = False  # inside a call beyond max_calls
        self._joiner, self._has_calls = CallJoiner(), False  # calls that a whole answer would have
        self._num_held_tokens = 0  # tokens with text that the parsers hold back
        self.num_calls = 0
        self.num_thought_tokens = 0

    @property
    def is_forced(self) -> bool:
        """Whether the answer has only calls, after reasoning at most."""
        return self._style.is_forced

    @property
    def is_plain(self) -> bool:
        """Whether no parser runs: all text is content."""
        return not self._parsers

    def read(self, delta: Delta) -> list[Part]:
        """Return the parts of a delta, without calls beyond max_calls. Text that a parser holds back becomes parts of a
        later delta."""
        if not self._parsers:
            return [Content(delta.text)] if delta.text else []
        parts = self._with_new_ids(parsed(self._parsers, delta.text, is_last=delta.finish_reason is not None))
        self._count(delta, parts)
        read = self._custom_calls.read([part for part in parts if self._is_admitted(part)])
        for part in read:
            use = self._joiner.read(part)
            self._has_calls |= use is not None
            self._unparsed.read(part, use)
        if delta.finish_reason is not None:
            call = self._unparsed.finish(is_whole=delta.finish_reason == "stop")
            if call is not None:
                self._on_unparsed(call)
        return read

    def _count(self, delta: Delta, parts: list[Part]) -> None:
        """Add a delta's reasoning tokens to `num_thought_tokens`. Tokens of text that a parser holds back are counted
        with the next parts. If a delta has reasoning and other parts, its tokens are split in proportion to their
        characters."""
        count = self._num_held_tokens + num_ids(delta.token_ids)
        num_said = sum(len(part.text) for part in parts if isinstance(part, Content | Arguments))
        is_thought = any(isinstance(part, Thought) for part in parts)
        if is_thought:
            share = math.ceil(count * min(1.0, num_said / max(1, len(delta.text))))
            self.num_thought_tokens += count - share
        self._num_held_tokens = 0 if parts else count

    def _with_new_ids(self, parts: list[Part]) -> list[Part]:
        """Return the parts with an id of this answer for each call whose id the model did not write, or wrote for an
        earlier call."""
        for position, part in enumerate(parts):
            if isinstance(part, CallBegin):
                if not part.has_own_id or part.id in self._call_ids:
                    new_id = f"call_{self._digits(len(self._call_ids))}"
                    parts[position] = part = CallBegin(part.name, new_id)
                self._call_ids.add(part.id)
        return parts

    def _is_admitted(self, part: Part) -> bool:
        if isinstance(part, CallBegin):
            self._is_dropping = self._style.max_calls is not None and self.num_calls >= self._style.max_calls
            self.num_calls += not self._is_dropping
        return not (self._is_dropping and isinstance(part, CallBegin | Arguments | CallEnd))

    def finish_reason(self, delta: Delta) -> str | None:
        """Return "tool_calls" for an answer with calls that ends with "stop", otherwise the delta's own reason.

        A call that would be content in a whole answer does not count. If tool_choice names a tool, the reason stays
        "stop", as with OpenAI and vLLM."""
        is_made = self._has_calls and self._style.forced_name is None
        return "tool_calls" if is_made and delta.finish_reason == "stop" else delta.finish_reason
