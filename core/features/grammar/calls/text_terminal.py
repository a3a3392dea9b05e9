"""Terminals for texts that conform to a string schema and stand in a call without JSON's quotes and escapes."""

from __future__ import annotations

from collections.abc import Iterator

from ..schemas.pattern_branches import escaped, found_anywhere
from ..schemas.schema import Schema, listed

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {  # each text conforms; of some formats there are further texts
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": "P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}H)?|T[0-9]{1,9}[HMS])",
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,32}}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"(https?|ftp)://{_HOST}(:[0-9]{{1,4}})?(/[a-zA-Z0-9._~-]{{0,64}}){{0,16}}(\?[a-zA-Z0-9=&._~-]{{0,256}})?",
}
LIMITS = ("minLength", "maxLength", "pattern", "format")


def conditions(schema: Schema) -> Iterator[str]:
    """Yield terminals that a text must match, all of them, to conform to the keywords of a string schema. RequestError
    as in `found_anywhere`. A schema that was joined from several may have a list of patterns."""
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        yield f"/(?s:.){{{low},{'' if high is None else high}}}/"
    for pattern in listed(schema.get("pattern", [])):
        yield f"/{found_anywhere(pattern)}/"
    if schema.get("format") in FORMATS:
        yield f"/{escaped(FORMATS[schema['format']])}/"
