"""receive_upload: reads the form of an upload from the socket to the disk. Only its small fields are held in memory."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from ....forms.openai.errors import HttpError
from ....forms.openai.files.file_object import FileRequest
from ....forms.openai.transcription_body import FORM_TYPE
from ....state.files import Description, FileRecord, Files, FileWriter
from ...api.continuation import current
from ...api.response_warnings import warn
from ...bodies.body_error import UNKNOWN_FIELD, BodyError, invalid_body
from ...bodies.form_data import PartHead, boundary_of
from ...bodies.form_parser import MAX_FIELD_BYTES
from ...bodies.form_stream import FormStream
from ...bodies.unknown_fields import described

FILE = "file"
EXPIRY = "expires_after"
FIELDS = ("purpose", f"{EXPIRY}[anchor]", f"{EXPIRY}[seconds]")


async def receive_upload(request: Request, files: Files, owner: bytes, *, is_strict: bool) -> FileRecord:
    """Store the file of a form and return its record. `is_strict`: refuse unknown fields instead of ignoring them.

    HttpError for headers that announce no form; BodyError for a form that is not well-formed or does not match
    FileRequest; QuotaExceeded, and the errors of `files`. Nothing is stored then."""
    stream = FormStream(_boundary(request))
    upload = _Upload(files, owner, is_strict=is_strict)
    try:
        async for data in request.stream():
            for event in stream.feed(data):
                if isinstance(event, PartHead):
                    await upload.begin_part(event)
                else:
                    await upload.add(event)
        stream.finish()
        record = await upload.finish()
    finally:
        upload.discard()
    if upload.ignored:
        warn(f"unknown fields were ignored: {', '.join(upload.ignored)}")
    return record


def _boundary(request: Request) -> str:
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != FORM_TYPE:
        raise HttpError(415, f"the body comes as {media_type or 'no type':.80}: send a form, {FORM_TYPE}")
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise HttpError(415, f"the body comes with content-encoding {coding:.40}: send it as it is")
    return boundary_of(content_type)


class _Upload:
    """The parts of one form, as far as they have come."""

    def __init__(self, files: Files, owner: bytes, *, is_strict: bool) -> None:
        self.ignored: list[str] = []
        self._files, self._owner, self._is_strict = files, owner, is_strict
        self._fields: dict[str, bytearray] = {}
        self._name = ""  # of the present part
        self._filename = ""
        self._writer: FileWriter | None = None

    async def begin_part(self, head: PartHead) -> None:
        self._name = head.name
        if head.name == FILE:
            if self._writer is not None:
                raise BodyError("file is given twice: send one file a request", param=FILE)
            if head.filename is None:
                text = "file has no filename, so that it is a plain field: send it as a file (curl: -F file=@PATH)"
                raise BodyError(text, param=FILE)
            self._filename = head.filename
            self._writer = await self._files.begin(self._owner, f"file-{current().digits('file')}")
        elif head.name in self._fields:
            raise BodyError(f"{head.name:.80} is given twice: give it once", param=head.name)
        elif head.name in FIELDS:
            self._fields[head.name] = bytearray()
        else:
            named = described(head.name, (FILE, *FIELDS))
            if self._is_strict:
                text = f"the form has an unknown field {named}: leave it out"
                raise BodyError(text, param=head.name, code=UNKNOWN_FIELD)
            self.ignored.append(named)

    async def add(self, content: bytes) -> None:
        if self._name == FILE:
            assert self._writer is not None
            await self._writer.write(content)
        elif (field := self._fields.get(self._name)) is not None:
            field += content
            if len(field) > MAX_FIELD_BYTES:
                text = f"{self._name} has over {MAX_FIELD_BYTES} bytes: shorten it"
                raise BodyError(text, param=self._name)

    async def finish(self) -> FileRecord:
        """Check the fields and store the file."""
        values: dict[str, object] = {} if self._writer is None else {FILE: ""}
        expiry: dict[str, str] = {}
        for name, raw in self._fields.items():
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                raise BodyError(f"{name} is not UTF-8 at byte {error.start}: encode it so", param=name) from None
            if name.startswith(EXPIRY):
                expiry[name.removeprefix(EXPIRY)[1:-1]] = text
            else:
                values[name] = text
        if expiry:
            values[EXPIRY] = expiry
        try:
            body = msgspec.convert(values, type=FileRequest, strict=False)
        except msgspec.ValidationError as error:
            raise invalid_body(error, b"") from None
        assert self._writer is not None, "file is a required field"
        self._writer.description = Description(self._filename, body.purpose, body.expires_s)
        return await self._writer.finish()

    def discard(self) -> None:
        """Remove the bytes that were written, unless the file is stored."""
        if self._writer is not None:
            self._writer.discard()
