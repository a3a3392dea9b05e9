"""CallMachine: reads the calls behind a start, in any form that joints describe.

Arguments in JSON are returned as they arrive, others one value or one call at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ....ipc.codec import JsonObject
from ..answer_forms.form import AnswerForm
from ..answer_forms.joint_plan import Forms, Joint
from .argument_types import ArgumentTypes
from .joints import Found, JointFinder, JointTable
from .json_calls import CallReader
from .literals import LiteralScanner, read_arguments
from .parts import Arguments, CallBegin, CallEnd, Part, UnreadCall, content, new_call_id
from .tagged_arguments import TaggedArguments, ending_joints

MAX_NAME = 256  # most characters of a call's name, and of white space around it
_NAME = re.compile(rf"\s{{0,{MAX_NAME}}}+[^\s<>{{}}()\[\]\"'=,;|`]{{0,{MAX_NAME}}}+\s{{0,{MAX_NAME}}}+")
Reading: TypeAlias = Callable[[str, bool], tuple[list[Part], str]]
_PLACE = re.compile(r"\{(NAME|INDEX|NUMBER)\}")
_WITH_JOINTS = ("name", "arguments", "after")  # states that joints end
_AT_ONCE = ("arguments", "after")  # states with joints that come at once or not at all
_READERS = {  # by state
    "head": "_read_head",
    "object": "_read_object",
    "name": "_read_name",
    "arguments": "_read_mid",
    "literal": "_read_literal",
    "tagged": "_read_tagged",
    "after": "_read_after",
}


class CallMachine:
    """Reader of calls that follow one another. `read` takes the next text, and whether it is the last of the answer. It
    returns the parts that are certain now, and the text that was not read.

    Once it `is_over`, no call follows the text so far: `failed` is text that looked like the begin of one, and with
    `is_closed` the calls have all of their end. `is_unread`: that text is a call of a tool, whose arguments cannot be
    read. `forms`: those of the last call, or of the one that failed first; `has_begun`: a call's name is known;
    `is_behind`: a call is complete."""

    def __init__(self, form: AnswerForm, table: JointTable, schemas: Mapping[str, JsonObject]) -> None:
        self._form = form
        self._table = table
        self._schemas = schemas
        self._types: dict[str, ArgumentTypes] = {}
        self._raw: list[str] = []  # the text of the call so far
        self._text: list[str] = []  # the text of the state so far
        self._values: dict[str, str] = {}  # the texts in place of {ID} and its like
        self._name = ""
        self._num_calls = 0
        self._now: Forms = ()  # forms that the call may be in
        # the end of a call that may be content, or a call that is, held until the text behind it is read
        self._end: CallEnd | UnreadCall | None = None
        self.read: Reading = self._read_head
        self.forms: Forms = ()
        self.has_begun = self.is_behind = self.is_over = self.is_closed = False
        self.failed = ""
        self.is_unread = False

    def begin(self, forms: Forms, start: str, values: dict[str, str]) -> None:
        """Begin behind the `start` of calls of `forms`. `values`: the texts in it in place of {ID} and its like."""
        self.has_begun = self.is_behind = self.is_over = self.is_closed = False
        self.failed = ""
        self._next(forms, start, values)

    def unfinished(self) -> tuple[list[Part], str]:
        """Return the parts of a call that the answer's end cuts off, and text that is no call."""
        if self._state == "object" and self._reader.is_call:
            return self._reader.finish(), ""
        if self._state == "object":
            return [], "".join(self._raw) + self._reader.held
        if self._state == "after":
            return self._held_end(), ""
        if self._state == "tagged":
            return [CallEnd("".join([*self._raw, *self._arguments.raw]))], ""
        return [], "".join([*self._raw, *self._text])

    def _next(self, forms: Forms, start: str, values: dict[str, str]) -> None:
        self.is_unread = False
        self._now = forms
        self._raw = [start]
        self._values = values
        self._enter("head")

    def _enter(self, state: str) -> None:
        self._state = state
        self.read = getattr(self, _READERS[state])
        self._text = []
        if state in _WITH_JOINTS:
            self._joints, automaton = self._table.state(state, self._now)
            self._finder = JointFinder(automaton, is_next=state in _AT_ONCE)

    def _fail(self, *more: str) -> list[Part]:
        """End: the text so far is no call. `more`: the last of it."""
        if not self.is_behind:
            self.forms = self._now
        self.failed = "".join([*self._raw, *more])
        self.is_over = True
        return []

    def _read_head(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        """Decide by the first character behind a start whether an object or a name follows."""
        begun = text.lstrip()
        if len(begun) < len(text):
            self._raw.append(text[: len(text) - len(begun)])
        if not begun:
            return [], ""
        kinds = self._table.kinds(self._now)
        if kinds.objects and begun[0] == "{":
            self._now = kinds.objects
            self._begin_object()
        elif kinds.others:
            self._now = kinds.related
            self._enter("name")
        else:
            self._fail()
        return [], begun

    def _begin_object(self) -> None:
        self._reader = CallReader("".join(self._raw), shape=self._table.kinds(self._now).shape)
        self._state = "object"
        self.read = self._read_object

    def _read_object(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        reader = self._reader
        parts = reader.append(text)
        if reader.is_call:
            self.has_begun = True
        if not reader.is_over:
            return parts, ""
        if not reader.is_call:
            return self._fail(), reader.rest
        *parts, end = parts
        assert isinstance(end, CallEnd)
        return [*parts, *self._complete(end.raw, is_object=reader.has_object)], reader.rest

    def _complete(self, raw: str, *, is_object: bool = True) -> list[Part]:
        """Enter the state behind a call's arguments. Return its end, unless it will be content, with all of its text,
        since its arguments are no object."""
        self._go_behind()
        if is_object:
            return [CallEnd(raw)]
        self._end = CallEnd(raw)
        return []

    def _go_behind(self) -> None:
        self.forms = self._now
        self.is_behind = True
        self._enter("after")

    def _held_end(self, more: str = "") -> list[Part]:
        """Return the end of the last call, if it is still held. `more`: the last of the call's text."""
        end = self._end
        self._end = None
        if end is None:
            return []
        if isinstance(end, UnreadCall):
            return [UnreadCall(end.text + more)]
        return [CallEnd(end.raw + more)]

    def _read_name(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        before, found, rest = self._finder.feed(text, is_last=is_last)
        name = "".join([*self._text, before])
        match = _NAME.match(name)
        assert match is not None, "it may be empty"
        if (end := match.end()) < len(name):
            return self._fail(name[:end]), name[end:] + self._finder.taken(found) + rest
        self._text = [name]
        if found is None:
            return self._begin_ended(name), rest
        joint = self._joints[found.joint]
        if joint.goal == "restart":
            return self._fail(name), found.text + rest
        self._name = name.strip()
        if not self._name:
            return self._fail(name, found.text), rest
        self._raw.append(name)
        if joint.goal != "head":  # its values are those of the next call
            self._values = self._values | found.values
        if joint.goal == "json":
            return self._begin_json(), found.text + rest
        if joint.goal in ("key", "between", "head", "end"):
            return self._begin_tagged(joint, found), rest
        self._raw.append(found.text)
        self._enter(joint.goal)
        if joint.goal == "literal":
            self._now = joint.forms
            self._scanner = LiteralScanner(self._form.calls[joint.forms[0]])
        return [], rest

    def _begin_call(self) -> CallBegin:
        """Return the begin of the call of `_name`."""
        self.has_begun = True
        form = self._form.calls[self._now[0]]
        number = self._values.get("NUMBER") or self._num_calls + 1
        index = self._values.get("INDEX") or int(number) - 1
        texts = {"NAME": self._name, "INDEX": str(index), "NUMBER": str(int(index) + 1)}
        own_id = self._values.get("ID") or _PLACE.sub(lambda place: texts[place[1]], form.id_text)
        self._num_calls += 1
        return CallBegin(self._name, own_id or new_call_id())

    def _begin_json(self) -> list[Part]:
        """Begin a call with arguments that follow as a JSON object."""
        begin = self._begin_call()
        self._reader = CallReader("".join(self._raw), has_name=True)
        self._enter("object")
        return [begin]

    def _read_mid(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        """Read the text between the joint behind a name and the arguments. Without arguments they are {}, but
        only before a joint or, if calls have no end, before the answer's."""
        before, found, rest = self._finder.feed(text, is_last=is_last)
        self._raw.append(before)
        if found is None:
            has_end = any(self._form.calls[number].end.strip() for number in self._now)
            if self._finder.has_failed and is_last and not rest.strip() and not has_end:
                return self._begin_empty(rest), ""
            return (self._fail() if self._finder.has_failed else []), rest
        joint = self._joints[found.joint]
        if joint.goal == "json":
            return self._begin_json(), found.text + rest
        if joint.goal == "null":
            return self._begin_empty(found.text), rest
        return [*self._begin_empty(""), *self._leave(joint, found)], rest

    def _begin_empty(self, written: str) -> list[Part]:
        """Return the parts of a call without arguments. `written`: the text in their place."""
        begin = self._begin_call()
        return [begin, Arguments("{}"), *self._complete("".join([*self._raw, written]))]

    def _read_literal(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        rest = self._scanner.append(text, is_last=is_last)
        self._text.append(text)
        if not self._scanner.is_over:
            return [], rest
        form = self._form.calls[self._now[0]]
        written = "".join(self._text)
        written = written[: len(written) - len(rest)]
        arguments = read_arguments(written[:-1], form)
        is_closed = written[-1] == form.close.strip()[:1]
        if arguments is None or not is_closed:
            self.is_unread = self._name in self._schemas
            if not (is_closed and self.is_unread):
                return self._fail(written), rest
            self._end = UnreadCall("".join([*self._raw, written]))  # other calls may follow
            self._go_behind()
            return [], rest
        begin = self._begin_call()
        return [begin, Arguments(arguments), *self._complete("".join([*self._raw, written]))], rest

    def _begin_tagged(self, joint: Joint, found: Found) -> list[Part]:
        begin = self._begin_call()
        self._arguments = TaggedArguments(self._table, self._now, self._types_of(self._name))
        self._enter("tagged")
        self._arguments.begin(joint, found)
        return [begin, Arguments("{"), *self._end_tagged()]

    def _types_of(self, name: str) -> ArgumentTypes | None:
        """Return the types of a tool's arguments, made for its first call; None for an unknown tool."""
        if name not in self._types and name in self._schemas:
            self._types[name] = ArgumentTypes(self._schemas[name])
        return self._types.get(name)

    def _begin_ended(self, name: str) -> list[Part]:
        """Return a call with tags if it is certain that it ends behind its name, though not yet before which joint."""
        joints = ending_joints(self._joints, self._finder)
        if not joints or not name.strip() or any("{" in joint.text for joint in joints if joint.goal == "end"):
            return []
        self._name = name.strip()
        self._raw.append(name)
        begin = self._begin_call()
        self._arguments = TaggedArguments(self._table, self._now, None)
        self._arguments.end_before(self._joints, self._finder)
        self._state = "tagged"
        self.read = self._read_tagged
        return [begin, Arguments("{"), *self._end_tagged()]

    def _read_tagged(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        parts, rest = self._arguments.read(text, is_last=is_last)
        return [*parts, *self._end_tagged()], rest

    def _end_tagged(self) -> list[Part]:
        """Return the last parts of a call with tags, once it is certain that a joint ends it."""
        arguments = self._arguments
        parts: list[Part] = []
        if arguments.is_over:
            arguments.is_over = False
            parts = [Arguments("}"), CallEnd("".join([*self._raw, *arguments.raw]))]
            parts += content("".join(arguments.stray))
        if arguments.left is not None:
            self._go_behind()
            self._leave(*arguments.left)
        return parts

    def _read_after(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        """Read the text behind a complete call: its end, the next call, or other text."""
        before, found, rest = self._finder.feed(text, is_last=is_last)
        if found is not None:
            return self._leave(self._joints[found.joint], found, before), rest
        if not self._finder.has_failed:
            return [], rest
        begun = rest.lstrip()
        if begun.startswith("{") and self._table.kinds(self._now).objects:  # a call without a joint before it
            self._raw = [rest[: len(rest) - len(begun)]]
            self._begin_object()
            return self._held_end(), begun
        if begun and (lines := self._lines()):
            end = self._held_end()
            self._next(lines, rest[: len(rest) - len(begun)], {})
            return end, begun
        self.is_over = True
        return self._held_end(), rest

    def _lines(self) -> Forms:
        """Return the forms of the last call in which a name follows it, with white space alone before it."""
        calls = self._form.calls
        return tuple(each for each in self._now if calls[each].kind == "literal" and not calls[each].next.strip())

    def _leave(self, joint: Joint, found: Found, before: str = "") -> list[Part]:
        """Go on behind the joint that follows a call. Return the call's end, if it is still held. `before`: the text
        between the two."""
        if joint.goal == "head":
            closing, opening = self._table.parted(self.forms, found.text)
            self._next(joint.forms, opening, found.values)
            return self._held_end(before + closing)
        self.is_over = True
        self.is_closed = joint.is_last
        return self._held_end(before + found.text)
