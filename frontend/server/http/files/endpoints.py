"""FileEndpoints: upload, list, describe, read and delete files, in OpenAI's form.

Files belong to the API key that has made them. Every frontend answers from the database and the folder.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .....ipc.digits import whole_number
from .....ipc.errors import RequestError
from ....forms.openai.errors import HttpError, json_response
from ....forms.openai.files.file_object import FileDeleted, FileList, FileObject, FileRequest
from ....state.contents import FileReader
from ....state.files import FileHeld, FileRecord, Files, QuotaExceeded
from ...bodies.body_error import BodyError
from ..endpoint import Endpoint
from ..middleware import owner_of
from .upload import receive_upload

PATH = "/v1/files"
CONTENT_TYPE = "application/octet-stream"
MAX_LISTED = 10_000  # files per page; OpenAI's limit


class FileEndpoints:
    """Handlers of /v1/files."""

    def __init__(self, files: Files | None, *, is_strict: bool) -> None:
        """`files`: None without a state folder. `is_strict`: refuse unknown fields."""
        self._given_files, self._is_strict = files, is_strict

    def endpoints(self) -> list[Endpoint]:
        one = f"{PATH}/{{file_id}}"
        return [
            Endpoint(PATH, self.create, "Upload a file", FileRequest),
            Endpoint(PATH, self.list, "Files: ?limit=10000&order=desc&after=ID&purpose=batch"),
            Endpoint(one, self.retrieve, "A file, without its content"),
            Endpoint(one, self.delete, "Delete a file", other_method="DELETE"),
            Endpoint(f"{one}/content", self.content, "The content of a file", media_type=CONTENT_TYPE),
        ]

    @property
    def _files(self) -> Files:
        if self._given_files is None:
            raise HttpError(400, "files need a folder that outlives the engine: start with --state-dir DIR")
        return self._given_files

    async def create(self, request: Request) -> Response:
        try:
            record = await receive_upload(request, self._files, owner_of(request), is_strict=self._is_strict)
        except BodyError as error:
            raise HttpError(error.status, str(error), param=error.param, code=error.code) from None
        except QuotaExceeded as error:
            raise HttpError(429, str(error), "insufficient_quota", param="file", code="insufficient_quota") from None
        return json_response(_shown(record))

    async def list(self, request: Request) -> Response:
        """Return one page of files, newest first unless `order` is asc. RequestError for an invalid parameter."""
        query = request.query_params
        given, order = query.get("limit", str(MAX_LISTED)), query.get("order", "desc")
        limit = whole_number(given)
        if limit is None or not 1 <= limit <= MAX_LISTED:
            raise RequestError(f"limit must be in [1, {MAX_LISTED}], got {given!r:.80}")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order!r:.80}")
        page = await self._files.page(
            owner_of(request), query.get("after"), limit, is_ascending=order == "asc", purpose=query.get("purpose")
        )
        shown = [_shown(record) for record in page.records]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return json_response(FileList(data=shown, first_id=first, last_id=last, has_more=page.has_more))

    async def retrieve(self, request: Request) -> Response:
        return json_response(_shown(await self._find(request)))

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        try:
            has_been = await self._files.delete(owner_of(request), file_id)
        except FileHeld as error:
            message = f"{file_id} is read by {error.holder}: wait until that is over, or cancel it"
            raise HttpError(409, message, param="file_id") from None
        if not has_been:
            raise _missing(file_id)
        return json_response(FileDeleted(id=file_id))

    async def content(self, request: Request) -> Response:
        record = await self._find(request)
        headers = {
            "content-length": str(record.num_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        if request.method == "HEAD":
            return Response(headers=headers, media_type=CONTENT_TYPE)
        reader = await self._files.open(record)
        return StreamingResponse(self._pieces(reader), headers=headers, media_type=CONTENT_TYPE)

    async def _pieces(self, reader: FileReader) -> AsyncGenerator[bytes, None]:
        try:
            while piece := await self._files.in_thread(reader.read):
                yield piece
        finally:
            reader.close()

    async def _find(self, request: Request) -> FileRecord:
        file_id = request.path_params["file_id"]
        record = await self._files.get(owner_of(request), file_id)
        if record is None:
            raise _missing(file_id)
        return record


def _missing(file_id: str) -> HttpError:
    return HttpError(404, f"No such File object: {file_id:.200}", param="id")


def _shown(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.num_bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )
