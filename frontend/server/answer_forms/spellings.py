"""Spellings of values in a literal form of calls: which of JSON, Python's literals and its own way a template writes.

A template that renders texts by itself often leaves lists and objects to `tojson` or to Python, whose quotes and words
are others. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import msgspec

from ...forms.answer_forms.form import CallForm

_TEXT = 'it\'s\n"Zq"'
_LIST = ["it's", True, None]
_OBJECT = {"zqInner": "it's", "zqOther": True, "zqThird": None}
_WORDS: dict[object, tuple[str, str]] = {None: ("null", "None"), False: ("false", "False"), True: ("true", "True")}


def with_spellings(form: CallForm, shown: Callable[[object], str]) -> CallForm:
    """Return a literal form with the spellings of its values. `shown(value)`: the template's text of an argument; empty
    if it shows none. A value that is written in another way has the form's own spelling."""
    form = msgspec.structs.replace(form, words=_words(shown))
    form = _spelled(form, "texts", _TEXT, shown)
    form = _spelled(form, "lists", _LIST, shown)
    return _spelled(form, "objects", _OBJECT, shown)


def _words(shown: Callable[[object], str]) -> tuple[str, ...]:
    """Return the words for null, false and true; () if none is shown."""
    written = {value: shown(value).strip() for value in _WORDS}
    places = [words.index(written[value]) for value, words in _WORDS.items() if written[value] in words]
    if not places:
        return ()
    return tuple(written[value] if written[value] in words else words[places[-1]] for value, words in _WORDS.items())


def _spelled(form: CallForm, field: str, value: object, shown: Callable[[object], str]) -> CallForm:
    """Return a form with a field that says how it spells `value`; JSON comes before Python, since their texts may be
    the same."""
    text = _squeezed(shown(value))
    for changes in ({field: "json"}, {field: "python"}, {}, {"has_bare_keys": True}):
        changed = msgspec.structs.replace(form, **changes)
        if text in map(_squeezed, _spellings(changed, value, field)):
            return changed
    return form


def _spellings(form: CallForm, value: object, field: str) -> Iterator[str]:
    """Yield the texts of a value in the spelling that a field of the form has."""
    spelling = getattr(form, field)
    if spelling == "json":
        yield json.dumps(value, ensure_ascii=False)
        yield json.dumps(value)
    elif spelling == "python":
        yield repr(value)
    else:
        yield _own(form, value)


def _own(form: CallForm, value: object) -> str:
    """Return a text, a word, or a list or an object of these, in the form's own spelling."""
    if isinstance(value, str) and form.texts == "own":
        return f"{form.quote}{value}{form.quote}"
    if isinstance(value, str):
        return next(_spellings(form, value, "texts"))
    if isinstance(value, list):
        return f"[{','.join(_own(form, each) for each in value)}]"
    if isinstance(value, dict):
        keys = [key if form.has_bare_keys else _own(form, key) for key in value]
        return f"{{{','.join(f'{key}:{_own(form, each)}' for key, each in zip(keys, value.values(), strict=True))}}}"
    return dict(zip(_WORDS, form.words, strict=False)).get(value, "")


def _squeezed(text: str) -> str:
    return "".join(text.split())
