"""Rewrite calls of custom tools. The model writes them as function calls with one argument, {"input": "…"}; callers get
calls with that text as their input."""

from __future__ import annotations

import re
from collections.abc import Collection

from .parts import Arguments, CallBegin, CallEnd, CustomBegin, CustomInput, Part

MAX_BEGIN = 1024  # most characters before the text in the arguments
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|{_HIGH}\\u[dD][c-fC-F]..|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|{_HIGH}(?!$|\\$|\\u))*')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROLS = dict(zip("ntrbf", "\n\t\r\b\f", strict=True))


class CustomCalls:
    """Filter for the parts of one answer. Replaces calls of custom tools by CustomBegin, CustomInput and CallEnd."""

    def __init__(self, names: Collection[str], *, is_text: bool) -> None:
        """`names`: the names of the custom tools. `is_text`: the model writes the input itself, without JSON around
        it."""
        self._names, self._is_text = names, is_text
        self._input: InputText | None = None  # reader of the open call's input

    def read(self, parts: list[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin) and part.name in self._names:
                self._input = InputText()
                read.append(CustomBegin(part.name, part.id))
            elif self._input is None or not isinstance(part, Arguments | CallEnd):
                read.append(part)
            elif isinstance(part, Arguments):
                text = part.text if self._is_text else self._input.append(part.text)
                read += [CustomInput(text)] if text else []
            else:
                rest, self._input = self._input.finish(), None
                read += [CustomInput(rest), part] if rest else [part]
        return read


class InputText:
    """Reader of the text in {"input": "…"}, piece by piece. `finish` returns arguments of another form unchanged."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False
        self._rest: list[str] = []  # text after the input, or after the start of arguments of another form

    def append(self, text: str) -> str:
        if self._rest:
            self._rest.append(text)
            return ""
        self._held += text
        if not self._has_begun:
            if (begin := _BEGIN.match(self._held)) is None:
                self._rest = [""] if len(self._held) > MAX_BEGIN else []
                return ""
            self._has_begun, self._held = True, self._held[begin.end() :]
        whole = _WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        self._rest = [self._held] if self._held.startswith('"') else []
        text = _ESCAPE.sub(_character, whole[0])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def finish(self) -> str:
        return "" if self._has_begun else self._held + "".join(self._rest)


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else _CONTROLS.get(escape[2], escape[2])
