"""Decode forms and check them as far as possible without the model, with the errors of JSON bodies (`body_parser.py`).

A list is sent as several parts with one name, which may end in `[]`. A file becomes the medium of an input; its bytes
are put into the blob store later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache

import msgspec

from ....ipc.messages.intake import BodyInput
from ...forms.media.held_medium import HeldMedium
from ...forms.openai.transcription_body import Form
from .body_error import UNKNOWN_FIELD, BodyError, invalid_body
from .body_parser import BodyT, ParsedBody
from .form_data import FormPart, form_parts
from .unknown_fields import MAX_NAMED, described

MAX_FIELD_BYTES = 64 << 10  # of a field that is no file


def parse_form(
    raw: bytes | bytearray, boundary: str, body_type: type[BodyT], *, is_strict: bool = False
) -> ParsedBody[BodyT]:
    """Decode and check a form; BodyError if it is not well-formed or does not match the schema. Unknown fields are
    refused if `is_strict`; otherwise they are dropped and named in the result."""
    assert issubclass(body_type, Form)
    is_list, fields, ignored = _fields(body_type), dict[str, object](), list[str]()
    media = list[HeldMedium]()
    for part in form_parts(raw, boundary):
        name = part.name.removesuffix("[]")
        if name not in is_list:
            named = described(part.name, is_list)
            if is_strict:
                raise BodyError(f"the form has an unknown field {named}: leave it out", param=name, code=UNKNOWN_FIELD)
            ignored.append(named)
            continue
        value: object = _text(name, part)
        if name in body_type.FILES:
            media.append(_medium(name, part))
            value = media[-1].digest.hex()
        elif part.is_file:
            raise BodyError(f"{name} is sent as a file: send it as a field without a filename", param=name)
        if is_list[name]:
            listed = fields.setdefault(name, [])
            assert isinstance(listed, list)
            listed.append(value)
        elif name in fields:
            raise BodyError(f"{name} is given twice: give it once", param=name)
        else:
            fields[name] = value
    try:
        body = msgspec.convert(fields, type=body_type, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_body(error, b"") from None
    return ParsedBody(body, [BodyInput(media=[each]) for each in media], ignored[:MAX_NAMED])


def _text(name: str, part: FormPart) -> str:
    if part.is_file:
        return ""
    if len(part.content) > MAX_FIELD_BYTES:
        text = f"{name} has {len(part.content)} bytes, at most {MAX_FIELD_BYTES} are taken: shorten it"
        raise BodyError(text, param=name)
    try:
        return str(part.content, "utf-8")
    except UnicodeDecodeError as error:
        raise BodyError(f"{name} is not UTF-8 at byte {error.start}: encode it so", param=name) from None


def _medium(name: str, part: FormPart) -> HeldMedium:
    if not part.is_file:
        text = f"{name} has no filename, so that it is a plain field: send it as a file (curl: -F {name}=@PATH)"
        raise BodyError(text, param=name)
    if not part.content:
        raise BodyError(f"{name} is empty: send the bytes of a file", param=name)
    medium = HeldMedium(kind="audio", digest=hashlib.sha256(part.content).digest())
    medium.__dict__["data"] = part.content
    return medium


@cache
def _fields(body_type: type[Form]) -> Mapping[str, bool]:
    """Return the names of a form's fields, and whether each is a list."""
    info = msgspec.inspect.type_info(body_type)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.encode_name: _has_list(field.type) for field in info.fields}


def _has_list(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.Metadata):
        return _has_list(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return any(map(_has_list, info.types))
    return isinstance(info, msgspec.inspect.ListType)
