"""CallsConstraint: a constraint that an answer makes calls in the model's own form, as the text of a grammar."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ..codec import JsonObject
from ..errors import RequestError
from .call_form import CallForm, shortest_begin


class CallsConstraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a constrained answer may be. Frontends write it as JSON, which is the text of the kind `calls`."""

    form: CallForm
    others: tuple[CallForm, ...] = ()  # further forms in which text may go on to calls, which begin with other markers
    value_ends: tuple[str, ...] = ()  # joints that a reader takes for the end of a value: no text of one holds them
    tools: dict[str, JsonObject | None]  # schema of the arguments by name; None: any JSON object
    has_text: bool = False  # calls may begin in text, or not at all; else the answer, from its begin on, is calls
    has_one_call: bool = False  # the answer ends behind the first call
    thought: tuple[str, str] | None = None  # what opens and closes a thought that may come before the calls
    may_begin_with_space: bool = False  # white space may come before the calls: the prompt has text before them

    def to_text(self) -> str:
        """Return the constraint as the text of a grammar."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> CallsConstraint:
        """Read the result of `to_text`; RequestError for any other text."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"structured_outputs.calls is not a constraint of calls: {error}") from None


class _Begins(msgspec.Struct, frozen=True):
    """The fields of a CallsConstraint that say how its calls begin: its schemas may be large."""

    form: CallForm
    others: tuple[CallForm, ...] = ()
    has_text: bool = False


def markers_in_text(text: str, tokens: Collection[str]) -> tuple[str, ...]:
    """Return the texts with which calls of a constraint begin in other text, so that text without them needs no mask.
    () if the constraint allows no other text, or if calls may begin without such a text or with white space in it,
    which may vary. text: of the constraint, as `CallsConstraint.to_text` returns it; tokens: the added tokens of the
    vocabulary, with which a text may begin, too."""
    begins = msgspec.json.decode(text, type=_Begins)
    if not begins.has_text:
        return ()
    found = tuple(dict.fromkeys(shortest_begin(form, tokens) for form in (begins.form, *begins.others)))
    return found if all(marker and len(marker.split()) == 1 for marker in found) else ()
