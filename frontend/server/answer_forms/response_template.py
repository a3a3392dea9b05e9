"""Converts the `response_template` of a checkpoint to an AnswerForm.

transformers reads it from tokenizer_config.json since 5.23, in version 1 (transformers/utils/chat_parsing): fields of a
message, each with the text or the regular expression that opens and the one that closes it, and with the name of a
parser for the text between. A template of literal texts becomes a form that every part of the engine knows. For others
the form names transformers' own reader (frontend/forms/parsers/response_templates/). Knows no chat template, and does
not prove that the two agree.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ...forms.answer_forms.form import AnswerForm, CallForm
from ...forms.parsers.response_templates.reader import ResponseTemplateParser

logger = logging.getLogger("tokenloom.frontend")

NAME = "response_template"
VERSION = 1
CONTENT = "content"
CALLS = "tool_calls"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_Paths: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # of a name, arguments and an id
_NAME_AND_REGION: _Paths = (("name",), (CONTENT,), ())  # the name is in the opening text
_EDGE_KEYS = frozenset(("open", "open_pattern", "close", "close_pattern"))
_ALL_KEYS = _EDGE_KEYS | {"content", "content_args", "repeats", "join", "optional", "transform", "transform_each"}
_GROUP = re.compile(r"\(\?P<(\w+)>((?:[^()\\]|\\.)*)\)")  # a named group without groups inside
_SPACE = re.compile(r"\\[sn][*+?]{0,2}|[ \n][*+?]{0,2}")  # white space of a pattern, repeated or not
_CHARACTER = re.compile(r"\\([^\w\s])|([^\\()[\]{}.*+?|^$])")
_WHOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")  # a transform's placeholder


class _OtherReader(Exception):
    """A part of a template that only transformers' reader knows."""


class _Edges(NamedTuple):
    """The texts around the region of a field."""

    open: str  # up to the name, if it has one
    after_name: str | None
    close: str

    @property
    def between(self) -> str:
        """The text between two calls."""
        return _joined(self.close, self.open)


def form_of_checkpoint(config: Mapping[str, object]) -> AnswerForm | None:
    """Return the form in the content of tokenizer_config.json, or None if it has none that can be read; then a line of
    the log says why."""
    given = config.get(NAME)
    if given is None:
        if config.get("response_schema") is not None:
            logger.info("response_schema in tokenizer_config.json is not read: only %s is", NAME)
        return None
    try:
        return _tried(form_of(given))
    except ValueError as error:
        logger.warning("%s in tokenizer_config.json is not used: %s", NAME, error)
        return None


def _tried(form: AnswerForm) -> AnswerForm:
    """Return a form after its reader has taken it. ValueError if transformers refuses it, or is too old."""
    if form.reader == NAME:
        try:
            ResponseTemplateParser(form.response_template, {}, is_inside_thought=False)
        except ImportError:
            raise ValueError("its expressions need the reader of transformers 5.23: upgrade transformers") from None
    return form


def form_of(template: object) -> AnswerForm:
    """Return the form of a response template. ValueError if it is of another version, or has a part that no reader
    takes."""
    fields = _fields_of(template)
    named = {name: field for name, field in fields.items() if name in THOUGHTS}
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are one field here: leave one")
    thought_field = next(iter(named.values()), None)
    for name in (*named, CONTENT):
        if fields.get(name, {}).get("content", "text") != "text":
            raise ValueError(f"the field {name} is text here: {fields[name]['content']!r} is not")
    thought = None
    try:
        if thought_field is not None:
            edges = _edges(thought_field)
            if not edges.open or not edges.close or edges.after_name is not None:
                raise _OtherReader
            thought = edges.open, edges.close
        calls = tuple(_calls(field) for name, field in fields.items() if name == CALLS)
        content_open, _ = _open_edge(fields.get(CONTENT, {}))
    except _OtherReader:
        if fields.get(CALLS, {}).get("content") == "xml-inline":
            raise ValueError("xml-inline is read only where its tags are literal texts around key and value") from None
        text = msgspec.json.encode(template).decode()
        return AnswerForm(name=NAME, reader="response_template", thought=thought, response_template=text)
    return AnswerForm(name=NAME, thought=thought, content_open=content_open, calls=calls)


def _fields_of(template: object) -> dict[str, JsonObject]:
    """Return the fields of a template. ValueError if it is no template of the known version, or a field has no place in
    an answer."""
    if not isinstance(template, dict):
        raise ValueError("it is no object")
    if template.get("version", 1) != VERSION:
        raise ValueError(f"only version {VERSION} is known, this is {template['version']!r}")
    fields = template.get("fields")
    if not isinstance(fields, dict) or not fields:
        raise ValueError("it has no fields")
    for name, field in fields.items():
        if name not in (CONTENT, CALLS, *THOUGHTS):
            raise ValueError(f"the field {name!r} has no place in an answer")
        is_known = isinstance(field, dict) and field.keys() <= _ALL_KEYS
        if not is_known or not isinstance(field.get("content_args", {}), dict):
            raise ValueError(f"the field {name!r} has parts that version {VERSION} does not have")
    if CALLS in fields and not (fields[CALLS].get("open") or fields[CALLS].get("open_pattern")):
        raise ValueError(f"nothing opens the field {CALLS}")
    return fields


def _edges(field: JsonObject) -> _Edges:
    """Return the texts around a field's region. _OtherReader if one is more than a literal with white space."""
    before, after_name = _open_edge(field)
    close, group = _plain_edge(field.get("close"), field.get("close_pattern"))
    if group is not None:
        raise _OtherReader
    return _Edges(before, after_name, close)


def _open_edge(field: JsonObject) -> tuple[str, str | None]:
    return _plain_edge(field.get("open"), field.get("open_pattern"))


def _plain_edge(literal: object, pattern: object) -> tuple[str, str | None]:
    """Return the text that a literal or a pattern stands for, up to the named group `name`, and the text behind it;
    None if there is no such group."""
    if isinstance(literal, list) and len(literal) == 1:
        literal = literal[0]
    if isinstance(literal, str):
        return literal, None
    if literal is None and pattern is None:
        return "", None
    if not isinstance(pattern, str):
        raise _OtherReader  # several literals
    before, groups, after = _parts(pattern)
    if not groups:
        return before, None
    if groups != ["name"]:
        raise _OtherReader
    return before, after[0]


def _parts(pattern: str) -> tuple[str, list[str], list[str]]:
    """Return the plain text before the first named group of a pattern, the groups' names and the plain text behind
    each."""
    first, *rest = _GROUP.split(pattern)  # text, name, inside, text, …
    return _plain(first), rest[0::3], [_plain(text) for text in rest[2::3]]


def _plain(pattern: str) -> str:
    """Return the text that a pattern matches, with one line break for white space. _OtherReader if it matches
    others."""
    text = ""
    position = 0
    while position < len(pattern):
        found = _SPACE.match(pattern, position)
        if found is not None:
            text += "\n"
        else:
            found = _CHARACTER.match(pattern, position)
            if found is None:
                raise _OtherReader
            text += found[1] or found[2]
        position = found.end()
    return text


def _calls(field: JsonObject) -> CallForm:
    """Return the form of a field of calls. _OtherReader if the machine cannot read it so."""
    edges = _edges(field)
    kind = field.get("content", "text")
    arguments = field.get("content_args", {})
    assert isinstance(arguments, dict), "checked in _fields_of"
    if kind == "xml-inline":
        return _tagged(edges, arguments, field)
    if kind != "json" or arguments.keys() - {"unquoted_keys", "string_delims"}:
        raise _OtherReader
    if arguments.get("unquoted_keys") or arguments.get("string_delims"):
        return _literal(edges, arguments, field)
    name, given, id_path = _paths(field)
    if edges.after_name is not None:
        if (name, given, id_path) != _NAME_AND_REGION or field.get("transform_each"):
            raise _OtherReader
        return CallForm(
            kind="json", start=edges.open.lstrip(), next=edges.between, end=edges.close, mid=edges.after_name
        )
    if not field.get("transform_each"):
        if any(path and path[0] != CONTENT for path in (name, given, id_path)):
            raise _OtherReader
        name = name[1:]
        given = given[1:]
        id_path = id_path[1:]
    if not name or not given:
        raise _OtherReader
    call = CallForm(
        kind="object",
        start=edges.open.lstrip(),
        next=edges.between,
        end=edges.close,
        name_path=name,
        arguments_path=given,
        id_path=id_path,
    )
    if not field.get("transform_each"):
        return call
    return msgspec.structs.replace(call, start=f"{call.start}[", next=", ", end=f"]{call.end}")


def _tagged(edges: _Edges, arguments: JsonObject, field: JsonObject) -> CallForm:
    pattern = arguments.get("tag_pattern")
    inner = arguments.get("value_parser") or {"name": "json"}
    if not isinstance(pattern, str) or edges.after_name is None or arguments.get("merge_duplicates"):
        raise _OtherReader
    if not isinstance(inner, dict) or inner.get("name") not in ("text", "json"):
        raise _OtherReader
    if _paths(field) != _NAME_AND_REGION:
        raise _OtherReader
    tag, groups, texts = _parts(pattern)
    if groups != ["key", "value"]:
        raise _OtherReader
    mid, behind = texts
    return CallForm(
        kind="tagged",
        start=edges.open.lstrip(),
        next=_joined(behind, edges.between),
        end=_joined(behind, edges.close),
        first=_joined(edges.after_name, tag),
        mid=mid,
        pair=_joined(behind, tag),
        empty_next=_joined(edges.after_name, edges.between),
        empty_end=_joined(edges.after_name, edges.close),
    )


def _literal(edges: _Edges, arguments: JsonObject, field: JsonObject) -> CallForm:
    match arguments.get("string_delims"):
        case [[str(quote), str(same)]] if quote == same:
            pass
        case _:
            raise _OtherReader
    if edges.after_name is None or not arguments.get("unquoted_keys"):
        raise _OtherReader
    if _paths(field) != _NAME_AND_REGION:
        raise _OtherReader
    return CallForm(
        kind="literal",
        start=edges.open.lstrip(),
        next=edges.between,
        end=edges.close,
        mid=f"{edges.after_name}{{",
        pair=",",
        assign=":",
        close="}",
        quote=quote,
    )


def _joined(one: str, other: str) -> str:
    """Return two texts with a line break between them, since white space may stand there."""
    return f"{one.rstrip()}\n{other.lstrip()}"


def _paths(field: JsonObject) -> _Paths:
    """Return where a transform finds the name, the arguments and the id of a call, as keys from its placeholders; ()
    for an id that it does not have."""
    transform = field.get("transform")
    if transform is None:
        if field.get("transform_each"):
            raise _OtherReader
        return (CONTENT, "function", "name"), (CONTENT, "function", "arguments"), ()
    if not isinstance(transform, dict):
        raise _OtherReader
    function = transform.get("function")
    id_path = _path(transform.get("id"))
    if isinstance(function, str):
        whole = _path(function)
        return (*whole, "name"), (*whole, "arguments"), id_path
    if not isinstance(function, dict):
        raise _OtherReader
    return _path(function.get("name")), _path(function.get("arguments")), id_path


def _path(placeholder: object) -> tuple[str, ...]:
    if placeholder is None:
        return ()
    if not isinstance(placeholder, str) or (whole := _WHOLE.fullmatch(placeholder)) is None:
        raise _OtherReader
    return tuple(whole[1].split("."))
