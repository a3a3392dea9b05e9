"""Remove unknown fields from an HTTP body before it is decoded, and return their names.

Applies to structs that forbid unknown fields. Messages allow them, since clients send back the fields of other servers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache

import msgspec
from msgspec import inspect

MAX_NAMED = 8  # unknown fields named in the answer
MAX_NAME_CHARACTERS = 64
CLOSE = 0.75  # least difflib ratio of a suggested field


def without_unknown(raw: bytes | bytearray, body_type: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
    """Return a body without its unknown fields, and the paths of the first MAX_NAMED of them, each with the most
    similar known field, if there is one."""
    found: list[str] = []
    return bytes(_known(msgspec.Raw(raw.strip()), body_type, "", found)), found


def _known(raw: msgspec.Raw, kind: type[msgspec.Struct], path: str, found: list[str]) -> msgspec.Raw:
    """Remove unknown fields from `raw` if it is an object of this struct or a list of them, and append their paths to
    `found`. `path`: prefix of the paths, with a dot at its end."""
    value: object
    match bytes(memoryview(raw)[:1]):
        case b"[":
            items = msgspec.json.decode(raw, type=list[msgspec.Raw])
            value = [_known(item, kind, f"{path[:-1]}[{i}].", found) for i, item in enumerate(items)]
        case b"{":
            known, value = _nested(kind), dict[str, msgspec.Raw]()
            for name, item in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
                if name in known:
                    inner = known[name]
                    value[name] = item if inner is None else _known(item, inner, f"{path}{name}.", found)
                elif len(found) < MAX_NAMED:
                    found.append(path + described(name, known))
        case _:
            return raw
    return msgspec.Raw(msgspec.json.encode(value))


def described(name: str, known: Iterable[str]) -> str:
    """Return the name of an unknown field for a message, with the most similar known field, if there is one."""
    shown = name[:MAX_NAME_CHARACTERS].encode("ascii", "backslashreplace").decode()
    near = difflib.get_close_matches(shown, list(known), 1, CLOSE)
    return "".join(filter(str.isprintable, shown)) + (f" (did you mean {near[0]}?)" if near else "")


@cache
def _nested(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Map the fields of a struct to the struct type inside them if it forbids unknown fields, else to None."""
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
    return info.cls if isinstance(info, inspect.StructType) and info.forbid_unknown_fields else None
