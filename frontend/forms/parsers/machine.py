"""AnswerMachine: the parser of answers in any form that joints describe: thought, content, calls.

A table of states, each with the joints that end it (`answer_forms/joint_plan.py`). Text between joints is thought,
content or part of a call, which CallMachine reads. The begin of a call that is none is text as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....ipc.codec import JsonObject
from ..answer_forms.form import AnswerForm
from ..answer_forms.joint_plan import Forms, Joint
from .call_machine import CallMachine, Reading
from .joints import Found, JointFinder, joint_table
from .parts import Content, Part, Thought, UnreadCall
from .white_space import EdgeFilter, Leading

MAX_OPENED = 1024  # most characters of other text inside a start
_SPACE = " \n\t\r\f\v"
_BEHIND_CALLS = ("closing", "outside")  # where parts of a call's end may still come, and where all of it has come
_BEGUN = {"opening": "thought", "begin": "outside", "begun": "outside"}  # states with joints that come at once or not
# at all, and the states of other text
_READERS = {  # by state
    **dict.fromkeys(_BEGUN, "_read_begin"),
    **dict.fromkeys(("thought", "outside", "closing", "failed"), "_read_text"),
    "opened": "_read_opened",
}


class AnswerMachine:
    """Parser of one answer. White space between calls is no content, nor is what the template writes itself."""

    def __init__(self, form: AnswerForm, schemas: Mapping[str, JsonObject], *, is_inside_thought: bool = False) -> None:
        """`schemas`: name of a tool → schema of its arguments. `is_inside_thought`: the answer begins inside a
        thought."""
        self._table = joint_table(form)
        self._call = CallMachine(form, self._table, schemas)
        self._outer = "outside"  # the state to return to from text that is no call
        self._start: list[str] = []  # the text of a start that other text interrupts
        self._inside = ""  # the other text
        self._skipped = ""  # characters that are dropped at the begin of a thought or content
        self._lead = Leading("")  # the template's own white space there
        self._behind_thought = form.spaces.behind_thought
        is_open = is_inside_thought and form.thought is not None
        self._edges = EdgeFilter(form.spaces, is_inside_thought=is_open)
        if is_open:
            self._enter("opening")
        elif form.thought is not None or form.content_open:
            self._enter("begin")
        else:
            self._enter("outside")

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers in the joints of the form."""
        return self._table.texts

    def append(self, text: str) -> list[Part]:
        if not text:
            return []
        parts, text = self._read(text, False)
        while text:
            found, text = self._read(text, False)
            parts += found
        if parts:
            return self._edges.read(parts)
        return parts

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. An incomplete call ends with its raw text, or is content if
        its name is incomplete."""
        parts, text = self._read("", True)
        while text:
            found, text = self._read(text, True)
            parts += found
        if self._state == "call":
            found, failed = self._call.unfinished()
            parts += [*found, *self._said(failed)]
        elif self._state == "opened":
            parts += self._said("".join(self._start) + self._inside)
        return [*self._edges.read(parts), *self._edges.finish()]

    def _enter(self, state: str, forms: Forms = ()) -> None:
        """Enter a state. `forms`: those of the calls before it, for text behind calls."""
        self._state = state
        self._read: Reading = getattr(self, _READERS[state])
        self._joints, automaton = self._table.state(state, forms)
        self._finder = JointFinder(automaton, is_next=state in _BEGUN)

    def _said(self, text: str) -> list[Part]:
        """Return text that belongs to no call: of the thought that is open, or content."""
        if not text:
            return []
        if self._outer == "thought":
            return [Thought(text)]
        return [Content(text)]

    def _skip(self, text: str) -> str:
        """Return text without the characters that are dropped where a thought or content begins."""
        text = self._lead.drop(text)
        if self._skipped:
            text = text.lstrip(self._skipped)
            if text:
                self._skipped = ""
        return text

    def _read_begin(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        if self._lead.space or self._skipped:
            text = self._skip(text)
        before, found, text = self._finder.feed(text, is_last=is_last)
        if self._finder.has_failed:
            self._outer = _BEGUN[self._state]
            self._enter(self._outer)
        elif found is not None:
            self._outer = "outside"
            return self._leave(self._joints[found.joint], before, found), text
        return [], text

    def _read_text(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        if self._lead.space or self._skipped:
            text = self._skip(text)
        before, found, text = self._finder.feed(text, is_last=is_last)
        if found is None and not before:
            return [], text
        self._outer = self._state
        if found is None:
            return self._said(before), text
        return self._leave(self._joints[found.joint], before, found), text

    def _leave(self, joint: Joint, before: str, found: Found) -> list[Part]:
        """Enter the state behind a joint in a thought or content. Return the text before it."""
        if self._state in _BEGUN and (joint.before or joint.goal not in ("head", "opened")):
            before = ""  # white space before a thought, a header, or a start that has some
        said = self._said(before)
        if joint.goal == "head":
            self._begin_call(joint, found.text, found)
        elif joint.goal == "late":
            self._enter(_BEHIND_CALLS[joint.is_last], self._call.forms)
        elif joint.goal == "opened":
            self._start = [found.text]
            self._inside = ""
            self._enter("opened")
        else:
            if joint.after:
                self._skipped = _SPACE
            elif joint.goal == "begun":
                self._begin_content()
            self._enter(joint.goal)
        return said

    def _begin_content(self) -> None:
        """Drop white space behind a thought: what the template writes or, if that is not known, all line breaks."""
        if self._behind_thought is None:
            self._skipped = "\n"
        else:
            self._lead = Leading(self._behind_thought)

    def _begin_call(self, joint: Joint, text: str, found: Found) -> None:
        self._state = "call"
        self._read = self._read_call
        self._call.begin(joint.forms, text, found.values)

    def _read_opened(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        """Read a start that other text interrupts: that text is content if the rest of the start follows."""
        before, found, rest = self._finder.feed(text, is_last=is_last)
        self._inside += before
        if len(self._inside) > MAX_OPENED:
            unread = self._inside[MAX_OPENED:] + self._finder.taken(found) + rest
            return self._give_up(self._inside[:MAX_OPENED]), unread
        if found is None:
            return [], rest
        joint = self._joints[found.joint]
        if joint.goal == "opened":
            return self._give_up(self._inside), found.text + rest
        if joint.goal == "outside":
            return self._give_up(self._inside + found.text), rest
        said = self._said(self._inside * bool(self._inside.strip()))
        self._begin_call(joint, "".join([*self._start, found.text]), found)
        return said, rest

    def _give_up(self, inside: str) -> list[Part]:
        """Return a start that no call follows as text, and enter the state before it."""
        self._enter(self._outer, self._call.forms)
        return self._said("".join(self._start) + inside)

    def _read_call(self, text: str, is_last: bool) -> tuple[list[Part], str]:
        parts, rest = self._call.read(text, is_last)
        if self._outer == "thought" and self._call.has_begun:
            self._outer = "outside"
        elif self._outer == "thought":
            parts = [Thought(part.text) if isinstance(part, UnreadCall) else part for part in parts]
        if not self._call.is_over:
            return parts, rest
        if self._call.failed:
            if self._call.is_behind:
                self._outer = "closing"
            elif self._outer != "thought":
                self._outer = "failed"
            said = self._said(self._call.failed)
            if self._call.is_unread and self._outer != "thought":
                said = [UnreadCall(self._call.failed)]
            parts += said
        elif self._outer != "thought":
            self._outer = _BEHIND_CALLS[self._call.is_closed]
        if is_last and not rest:
            self._state = self._outer
        else:
            self._enter(self._outer, self._call.forms)
        return parts, rest
