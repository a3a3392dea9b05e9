"""White space at the edges of an answer's texts: what a chat template writes itself, and texts of nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ..answer_forms.form import Spaces
from .parts import Arguments, Content, Part, Thought, UnreadCall, content

Kind: TypeAlias = type[Content] | type[Thought]


class Leading:
    """White space to drop at the start of a text, as far as the text has it. `space`: what may still come."""

    __slots__ = ("space",)

    def __init__(self, space: str) -> None:
        self.space = space

    def drop(self, text: str) -> str:
        """Return the next piece of the text without the white space."""
        if not self.space or not text:
            return text
        count = _num_shared(self.space, text)
        self.space = self.space[count:] * (count == len(text))
        return text[count:]


_NO_LEAD = Leading("")


class BlankFilter:
    """Filter that drops runs of content which are only white space. White space at the start of a run is held until
    text follows it in the run."""

    def __init__(self, *, keeps_first: bool = False) -> None:
        """`keeps_first`: content at the start of the answer is kept, even if it is only white space."""
        self._space = ""
        self._has_text = keeps_first  # the open content has more than white space

    def read(self, parts: Iterable[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            if not isinstance(part, Content):
                self._space, self._has_text = "", False
                read.append(part)
            elif self._has_text:
                read.append(part)
            elif isinstance(part, UnreadCall):
                read += [*content(self._space), part]
                self._space = ""
                self._has_text = True
            else:
                self._space += part.text
                if self._space.strip():
                    read.append(Content(self._space))
                    self._space = ""
                    self._has_text = True
        return read


class EdgeFilter:
    """Filter that drops the white space of a form around thoughts and content, so that the template writes each text
    again as the model wrote it. Content of white space alone is dropped, unless it is the whole answer.

    White space that may be dropped is held until it is known what follows. Where a model wrote less than the form has,
    that is dropped; of more the rest is kept."""

    def __init__(self, spaces: Spaces, *, is_inside_thought: bool) -> None:
        """`is_inside_thought`: the answer begins inside a thought."""
        self._spaces = spaces
        self._kind: Kind | None = None  # of the open text
        self._plain_kind: Kind | None = None  # the same, once nothing is to be dropped but white space at its end
        self._content_lead = spaces.content  # before the next content
        self._thought_lead = spaces.prompted_thought if is_inside_thought else spaces.thought_open  # and thought
        self._lead = _NO_LEAD  # of the open text
        self._blank: list[str] = []  # white space at the start of the open content
        self._has_text = False  # the open text has more than white space, or is a thought
        self._is_first = True  # nothing came before the open text
        self._held = ""  # white space at the end of the open text
        self._tail = ""  # the white space that the form has behind the open text

    def read(self, parts: list[Part]) -> list[Part]:
        if len(parts) == 1:
            kind = type(parts[0])
            if kind is Arguments:  # they stand in a call, behind the end of any text
                return parts
            if kind is self._plain_kind and not (self._held or self._tail):
                return parts
        read: list[Part] = []
        for part in parts:
            if type(part) is self._plain_kind and not (self._held or (self._tail and part.text[-1:].isspace())):
                read.append(part)
            elif isinstance(part, (Content, Thought)):  # a tuple: unions are slow
                kind = _kind_of(part)
                if kind is not self._kind:
                    if self._kind is not None:
                        read += self._end(is_called=False)
                    self._begin(kind)
                if isinstance(part, UnreadCall):
                    read += [*self._all_held(), part]
                else:
                    read += self._text(part.text)
            else:
                if self._kind is not None or self._is_first:
                    read += self._end(is_called=True)
                    self._content_lead = ""
                    self._is_first = False
                read.append(part)
        return read

    def finish(self) -> list[Part]:
        """Return the white space that was held back at the end of the answer."""
        if self._is_first and not self._has_text:
            return self._part("".join(self._blank))
        return self._end(is_called=False)

    def _begin(self, kind: Kind) -> None:
        spaces = self._spaces
        self._kind = kind
        self._has_text = kind is Thought
        lead = self._content_lead
        self._tail = spaces.calls
        if kind is Thought:
            lead = self._thought_lead
            self._tail = spaces.thought_close
        self._lead = Leading(lead) if lead else _NO_LEAD
        self._content_lead = ""
        self._thought_lead = spaces.thought_open

    def _end(self, *, is_called: bool) -> list[Part]:
        """End the open text, if any. Return what was held of it. `is_called`: a call follows."""
        if self._kind is None:
            return []
        kept = self._held
        if kept and (is_called or self._kind is Thought):
            kept = kept[: len(kept) - _num_shared(kept[::-1], self._tail[::-1])]
        parts = self._part(kept)
        self._kind = self._plain_kind = None
        self._held = ""
        self._blank = []
        self._is_first = False
        return parts

    def _all_held(self) -> list[Part]:
        """Return the white space that is held: more than white space follows it."""
        held = "".join(self._blank) * (not self._has_text) + self._held
        self._has_text = True
        self._held = ""
        return content(held)

    def _text(self, text: str) -> list[Part]:
        """Return what is certain of the open text, with more of it."""
        if self._lead.space:
            text = self._lead.drop(text)
        if not self._has_text:
            if not text or text.isspace():
                self._blank.append(text)
                return []
            if self._blank:
                text = "".join([*self._blank, text])
            self._has_text = True
        if text:
            self._plain_kind = self._kind
        text = self._held + text
        num_spaces = len(text) - len(text.rstrip())
        end = len(text) - min(num_spaces, len(self._tail))
        self._held = text[end:]
        return self._part(text[:end])

    def _part(self, text: str) -> list[Part]:
        if text and self._kind is Thought:
            return [Thought(text)]
        return content(text)


def _kind_of(part: Content | Thought) -> Kind:
    if isinstance(part, Thought):
        return Thought
    return Content


def _num_shared(one: str, other: str) -> int:
    """Return the number of characters that both texts begin with."""
    for place, (letter, wanted) in enumerate(zip(one, other, strict=False)):
        if letter != wanted:
            return place
    return min(len(one), len(other))
