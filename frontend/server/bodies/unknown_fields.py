"""Remove the parts of an HTTP body that have no meaning here, before it is decoded, and return their names.

These are unknown fields of structs that forbid them (messages allow them, since clients send back the fields of other
servers), and items of lists that only another server could run or read: LEFT_OUT of their struct matches their type.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

import msgspec
from msgspec import inspect

MAX_NAMED = 8  # unknown fields named in the answer
MAX_NAME_CHARACTERS = 64
CLOSE = 0.75  # least difflib ratio of a suggested field
LEFT_OUT = "LEFT_OUT"  # of a struct: regex of the types whose items are left out of a list


def without_unknown(raw: bytes | bytearray, body_type: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
    """Return a body without its unknown fields and left-out items, and descriptions of the first MAX_NAMED of them: the
    path of a field with the most similar known field, if there is one, or the path of an item with its type."""
    found: list[str] = []
    return bytes(_known(msgspec.Raw(raw.strip()), body_type, "", found)), found


def _known(raw: msgspec.Raw, kind: type[msgspec.Struct], path: str, found: list[str]) -> msgspec.Raw:
    """Remove unknown fields from `raw` if it is an object of this struct or a list of them, and append their paths to
    `found`, up to MAX_NAMED entries. `path`: prefix of the paths, with a dot at its end."""
    value: object
    match bytes(memoryview(raw)[:1]):
        case b"[":
            items = msgspec.json.decode(raw, type=list[msgspec.Raw])
            places = [(f"{path[:-1]}[{i}]", item) for i, item in enumerate(items)]
            value = [
                _known(item, kind, f"{place}.", found)
                for place, item in places
                if not _is_left_out(item, kind, place, found)
            ]
        case b"{":
            known, value = _nested(kind), dict[str, msgspec.Raw]()
            for name, item in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
                if (inner := known.get(name)) is not None:
                    value[name] = _known(item, inner, f"{path}{name}.", found)
                elif name in known or not _is_strict(kind):
                    value[name] = item
                elif len(found) < MAX_NAMED:
                    found.append(path + described(name, known))
        case _:
            return raw
    return msgspec.Raw(msgspec.json.encode(value))


class _Typed(msgspec.Struct):
    type: object = None


def _is_left_out(raw: msgspec.Raw, kind: type[msgspec.Struct], path: str, found: list[str]) -> bool:
    """Return whether an item is left out because of its type; if so, append its path and type to `found`, up to
    MAX_NAMED entries."""
    pattern: str | None = getattr(kind, LEFT_OUT, None)
    if pattern is None or bytes(memoryview(raw)[:1]) != b"{":
        return False
    given = msgspec.json.decode(raw, type=_Typed).type
    if not isinstance(given, str) or not re.fullmatch(pattern, given[: 2 * MAX_NAME_CHARACTERS]):
        return False
    if len(found) < MAX_NAMED:
        found.append(f"{path} of type {_shown(given)}")
    return True


def described(name: str, known: Iterable[str]) -> str:
    """Return the name of an unknown field for a message, with the most similar known field, if there is one."""
    near = difflib.get_close_matches(_escaped(name), list(known), 1, CLOSE)
    return _shown(name) + (f" (did you mean {near[0]}?)" if near else "")


def _shown(name: str) -> str:
    return "".join(filter(str.isprintable, _escaped(name)))


def _escaped(name: str) -> str:
    return name[:MAX_NAME_CHARACTERS].encode("ascii", "backslashreplace").decode()


@cache
def _nested(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Return, for each field of a struct, the struct type in the field if something may be removed there, else None."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _strict_in(field.type) for field in info.fields}


def _strict_in(info: inspect.Type) -> type[msgspec.Struct] | None:
    if isinstance(info, inspect.Metadata):
        return _strict_in(info.type)
    if isinstance(info, inspect.ListType):
        return _strict_in(info.item_type)
    if isinstance(info, inspect.UnionType):
        return next(filter(None, map(_strict_in, info.types)), None)
    if isinstance(info, inspect.StructType) and (info.forbid_unknown_fields or hasattr(info.cls, LEFT_OUT)):
        return info.cls
    return None


def _is_strict(kind: type[msgspec.Struct]) -> bool:
    return bool(kind.__struct_config__.forbid_unknown_fields)
