"""The first difference of a prompt from the nearest earlier one of its conversation: where it lies, and of which kind.

Only prompts that repeat computed tokens behind the difference have one: others go on differently, and cost no more than
they must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....ipc.messages.base import DifferenceKind, PromptDifference
from ....ipc.messages.client import ChatField
from .moved_tokens import moved_tokens, num_common
from .seen_prompts import SeenPrompt

THOUGHTS = (".reasoning_content", ".reasoning", ".thinking")


def difference(earlier: SeenPrompt, later: SeenPrompt) -> PromptDifference | None:
    """Return the first difference, and how many tokens behind it were computed before; None if there are none."""
    prompt = later.prompt_ids
    first = num_common(earlier.token_ids, prompt)
    if 4 * first == min(len(earlier.token_ids), len(prompt)):
        return None  # one continues the other
    moved = moved_tokens(earlier.token_ids, prompt, first)
    if not moved.num_tokens:
        return None
    kind, field = place_of(earlier, later, first, is_cut=moved.is_cut)
    return PromptDifference(kind=kind, field=field, token=first, num_tokens=moved.num_tokens)


def place_of(earlier: SeenPrompt, later: SeenPrompt, first: int, *, is_cut: bool) -> tuple[DifferenceKind, str]:
    """Return the kind of the difference at token `first`, and the field of the request in which it lies."""
    if not later.fields:
        return "text", "prompt"
    if first >= earlier.num_prompt_tokens:
        kind: DifferenceKind = "thoughts" if is_cut else "answer"
        return kind, f"messages[{_num_messages(earlier.fields)}]"
    before, after = _by_name(earlier.fields), _by_name(later.fields)
    changed = [name for name in {**before, **after} if _digest(before, name) != _digest(after, name)]
    changed = [name for name in changed if name in before or _message_of(name) < _num_messages(earlier.fields)]
    tools = [name for name in changed if name.startswith("tools")]
    others = [name for name in changed if name not in tools]
    if others and before.get(others[0], after.get(others[0])).role in ("system", "developer"):  # type: ignore[union-attr]
        return _kind_in(others[0], before, after), others[0]
    if tools:
        is_order = sorted(_tools(before)) == sorted(_tools(after))
        return ("tools_order" if is_order else "tools"), tools[0]
    if others:
        return _kind_in(others[0], before, after), others[0]
    return ("thoughts" if is_cut else "template"), "chat_template"


def _kind_in(name: str, before: Mapping[str, ChatField], after: Mapping[str, ChatField]) -> DifferenceKind:
    """Return the kind of the difference in a field."""
    one, other = before.get(name), after.get(name)
    if one is not None and other is not None and one.masked == other.masked:
        return "time"
    field = other or one
    assert field is not None
    if not field.role:
        return "template"
    if other is None and name.endswith(THOUGHTS):
        return "thoughts"
    return "system" if field.role in ("system", "developer") else "message"


def _by_name(fields: Sequence[ChatField]) -> dict[str, ChatField]:
    return {field.name: field for field in fields}


def _digest(fields: Mapping[str, ChatField], name: str) -> bytes:
    field = fields.get(name)
    return b"" if field is None else field.digest


def _tools(fields: Mapping[str, ChatField]) -> list[bytes]:
    return [field.digest for field in fields.values() if field.role == "tools"]


def _message_of(name: str) -> int:
    """Return the index of the message that has a field; 0 for other fields."""
    index = name.partition("]")[0].removeprefix("messages[")
    return int(index) if index.isdecimal() else 0


def _num_messages(fields: Sequence[ChatField]) -> int:
    return max((_message_of(field.name) + 1 for field in fields if field.name.startswith("messages[")), default=0)
