"""TaggedArguments: reads a call's arguments one by one: key, value, key, value, with joints between them.

Values are texts without quotes; the joint before a value or the tool's schema determines its type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..answer_forms.joint_plan import Forms, Joint
from .argument_types import ArgumentTypes
from .joints import Found, JointFinder, JointTable
from .literals import read_json
from .markers import MarkerFinder
from .parts import Arguments, Part

CDATA_END = "]]>"
_ENDS = ("head", "end")  # goals of joints that end a call


class TaggedArguments:
    """Reader of the arguments of one call, from the joint behind its name to the one that ends it, which is `left`
    then. `is_over`: it is certain that a joint ends the call, though a longer one may come. `raw`: the text so far.
    `stray`: other text between the arguments."""

    def __init__(self, table: JointTable, forms: Forms, types: ArgumentTypes | None) -> None:
        """`types`: those of the tool's arguments; None for an unknown tool: its arguments are texts."""
        self._table = table
        self._forms = forms
        self._types = types
        self._text: list[str] = []  # of the state so far
        self._key = ""
        self._mid = Joint("", "")  # the joint before the value
        self._is_blank = True  # the value has no text so far
        self._has_cdata = False
        self._cdata = MarkerFinder(CDATA_END)
        self._comma = ""  # before the next argument
        self._reads: dict[str, Callable[[str, Found | None], list[Part]]] = {
            "key": self._read_key,
            "value": self._read_value,
            "between": self._read_between,
        }
        self.raw: list[str] = []
        self.stray: list[str] = []
        self.left: tuple[Joint, Found] | None = None
        self.is_over = False
        self._has_ended = False  # before a joint that is held

    def begin(self, joint: Joint, found: Found) -> None:
        """Begin behind the joint after the name, which may already end the call."""
        self._leave(joint, found)

    def read(self, text: str, *, is_last: bool) -> tuple[list[Part], str]:
        """Read the next text. Return the arguments that are complete now, and the text behind the call."""
        if self._state == "cdata":
            return [], self._read_cdata(text, is_last=is_last)
        before, found, rest = self._finder.feed(text, is_last=is_last)
        self.raw.append(before)
        if self._has_ended:
            if found is not None:
                self._leave(self._joints[found.joint], found)
            return [], rest
        parts = self._reads[self._state](before, found)
        if found is None:
            parts += self._end(ending_joints(self._joints, self._finder))
        return parts, rest

    def end_before(self, joints: Sequence[Joint], finder: JointFinder) -> None:
        """Begin with joints behind the name of which one, that `finder` holds, ends the call."""
        self._joints = joints
        self._finder = finder
        self._has_ended = self.is_over = True
        self._state = "between"

    def _end(self, joints: list[Joint]) -> list[Part]:
        """End the call before one of these joints, which is held, if there are any. Return the argument that ends
        there, if there is one and it ends alike before all of them."""
        is_in_value = self._state == "value"
        if not joints or (is_in_value and (len({joint.before for joint in joints}) > 1 or _repeats_key(joints))):
            return []
        self._has_ended = self.is_over = True
        if is_in_value:
            return [self._argument(joints[0])]
        self._add_stray()
        return []

    def _enter(self, state: str) -> None:
        self._state = state
        self._text = []
        self._joints, automaton = self._table.state(state, self._forms)
        self._finder = JointFinder(automaton)

    def _leave(self, joint: Joint, found: Found) -> None:
        """Enter the state behind a joint, or end the call."""
        if joint.goal in ("key", "between"):
            self.raw.append(found.text)
            self._enter(joint.goal)
        else:
            self.left = (joint, found)
            self.is_over = not self._has_ended

    def _read_key(self, before: str, found: Found | None) -> list[Part]:
        self._text.append(before)
        if found is not None:
            self.raw.append(found.text)
            self._key = "".join(self._text).strip()
            self._mid = self._joints[found.joint]
            self._is_blank = True
            self._has_cdata = False
            self._enter("value")
        return []

    def _read_value(self, before: str, found: Found | None) -> list[Part]:
        is_blank = (self._is_blank or self._has_cdata) and not before.strip()
        self._is_blank = self._is_blank and is_blank
        if not (self._has_cdata and is_blank):
            self._text.append(before)
        if found is None:
            return []
        joint = self._joints[found.joint]
        is_other_key = found.values.get("KEY", self._key) != self._key
        if joint.goal == "cdata" or is_other_key:
            self.raw.append(found.text)
        if joint.goal == "cdata" and self._is_blank:
            self._text = []
            self._has_cdata = True
            self._state = "cdata"
            return []
        if joint.goal == "cdata" or is_other_key:
            self._text.append(found.text)
            self._is_blank = False
            return []
        argument = self._argument(joint)
        self._leave(joint, found)
        return [argument]

    def _read_cdata(self, text: str, *, is_last: bool) -> str:
        """Read text that no joint ends. Return the text behind it."""
        before, marker, rest = self._cdata.feed(text)
        if is_last and not marker:
            before += self._cdata.finish()
        self.raw += before, marker
        self._text.append(before)
        if marker:
            self._state = "value"
            self._is_blank = False
        return rest

    def _read_between(self, before: str, found: Found | None) -> list[Part]:
        self._text.append(before)
        if found is not None:
            self._add_stray()
            self._leave(self._joints[found.joint], found)
        return []

    def _add_stray(self) -> None:
        stray = "".join(self._text)
        if stray.strip():
            self.stray.append(stray)

    def _argument(self, joint: Joint) -> Part:
        """Return the argument that ends at `joint`."""
        text = "".join(self._text)
        if not self._has_cdata:
            text = text.removeprefix(self._mid.after).removesuffix(joint.before)
        comma = self._comma
        self._comma = ", "
        return Arguments(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {self._value(text)}")

    def _value(self, text: str) -> str:
        """Return a value's JSON text."""
        value_type = self._mid.value_type
        if value_type and value_type != "string":
            return read_json(text)
        if self._types is None or (value_type and self._types.may_be_text(self._key)):
            return json.dumps(text, ensure_ascii=False)
        return self._types.written(self._key, text)


def ending_joints(joints: Sequence[Joint], finder: JointFinder) -> list[Joint]:
    """Return the joints that may be the one that `finder` of `joints` holds, if all of them end the call; else none."""
    found = [joints[number] for number in finder.next_joints]
    return found * all(joint.goal in _ENDS for joint in found)


def _repeats_key(joints: Sequence[Joint]) -> bool:
    return any("{KEY}" in joint.text for joint in joints)
