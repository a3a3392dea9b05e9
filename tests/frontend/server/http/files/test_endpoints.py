"""/v1/files is OpenAI's: its client uploads, lists, reads and deletes, and errors have its form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx2
import openai
import pytest
from starlette.routing import Router

from tokenloom.frontend.listening.keys.api_keys import ApiKeys
from tokenloom.frontend.server.http.endpoint import routes
from tokenloom.frontend.server.http.files.endpoints import FileEndpoints
from tokenloom.frontend.server.http.middleware import HttpMiddleware
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.files import Files
from tokenloom.frontend.state.schema import FILE
from tokenloom.tests.frontend.server.http.served_app import AppTransport
from tokenloom.tests.support.in_loop import in_loop

MAX_BODY_BYTES = 1000
QUOTA_BYTES = 300_000
KEYS = ("sk-one", "sk-two")
Form: TypeAlias = dict[str, tuple[str | None, bytes | str]]
LINES = b'{"custom_id": "a"}\n' * 5000  # larger than a body of other endpoints


class Served:
    """The app of file endpoints in a folder, and the clients of two keys."""

    def __init__(self, folder: Path, *, is_strict: bool, has_folder: bool) -> None:
        (folder / "files").mkdir(exist_ok=True)
        self.folder = folder / "files"
        self._database = Database(folder / FILE, is_durable=True)
        self._files = Files(self._database, self.folder, QUOTA_BYTES)
        router = Router(routes(FileEndpoints(self._files if has_folder else None, is_strict=is_strict).endpoints()))
        self.app = HttpMiddleware(router, ApiKeys(KEYS), MAX_BODY_BYTES, lambda why: None)
        self.http = [self._http(key) for key in KEYS]
        self.client = openai.AsyncOpenAI(
            base_url="http://app/v1", api_key=KEYS[0], max_retries=0, http_client=self.http[0]
        )

    def _http(self, key: str) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.AsyncClient(transport=AppTransport(self.app), base_url="http://app", headers=headers)

    def close(self) -> None:
        self._files.close()
        self._database.close()


@asynccontextmanager
async def serving(folder: Path, *, is_strict: bool = False, has_folder: bool = True) -> AsyncIterator[Served]:
    served = Served(folder, is_strict=is_strict, has_folder=has_folder)
    try:
        async with asyncio.timeout(30):
            yield served
    finally:
        for each in served.http:
            await each.aclose()
        served.close()


@in_loop(serving)
async def test_openais_client_uploads_lists_reads_and_deletes(served: Served) -> None:
    files = served.client.files
    first = await files.create(file=("in.jsonl", LINES), purpose="batch")
    assert (first.bytes, first.filename, first.purpose) == (len(LINES), "in.jsonl", "batch")
    assert first.expires_at == first.created_at + 30 * 86400 and first.status == "processed"
    expiry = {"anchor": "created_at", "seconds": 3600}
    second = await files.create(file=("naïve.txt", b"x"), purpose="user_data", expires_after=expiry)  # type: ignore[arg-type]
    assert second.expires_at == second.created_at + 3600 and second.filename == "naïve.txt"
    third = await files.create(file=("c", b""), purpose="evals")
    assert third.expires_at is None and third.bytes == 0
    assert [each.id async for each in files.list(limit=1)] == [third.id, second.id, first.id]
    assert [each.id async for each in files.list(order="asc", purpose="batch")] == [first.id]
    assert (await files.retrieve(first.id)).to_dict() == first.to_dict()
    assert (await files.content(first.id)).content == LINES
    head = await served.http[0].head(f"/v1/files/{first.id}/content")
    assert head.headers["content-length"] == str(len(LINES)) and head.content == b""
    assert (await files.content(third.id)).content == b""
    assert (await files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError, match=f"No such File object: {first.id}"):
        await files.content(first.id)
    assert sorted(path.name for path in served.folder.iterdir()) == sorted([second.id, third.id])


@pytest.mark.parametrize("limit", ["0", "10001", "-1", "a", "²", "9" * 5000])
@in_loop(serving)
async def test_a_page_has_1_to_10000_files(served: Served, limit: str) -> None:
    answer = await served.http[0].get("/v1/files", params={"limit": limit})
    assert answer.status_code == 400 and "limit must be in [1, 10000], got" in answer.text


@in_loop(serving)
async def test_another_keys_files_are_unknown(served: Served) -> None:
    mine = await served.client.files.create(file=("a", b"a"), purpose="vision")
    you = served.http[1]
    assert (await you.get("/v1/files")).json()["data"] == []
    for answer in (
        await you.get(f"/v1/files/{mine.id}"),
        await you.get(f"/v1/files/{mine.id}/content"),
        await you.delete(f"/v1/files/{mine.id}"),
    ):
        assert answer.status_code == 404 and answer.json()["error"]["param"] == "id"
    assert (await served.client.files.content(mine.id)).content == b"a"


@in_loop(serving)
async def test_a_refused_upload_leaves_nothing(served: Served) -> None:
    form: Form = {"purpose": (None, "batch"), "file": ("a", b"{}")}
    cases: list[tuple[Form, int, str, str]] = [
        ({"file": form["file"]}, 400, "purpose", "missing required field `purpose`"),
        ({"purpose": form["purpose"]}, 400, "file", "missing required field `file`"),
        (form | {"purpose": (None, "other")}, 400, "purpose", "Invalid enum value 'other'"),
        (form | {"file": (None, "{}")}, 400, "file", "send it as a file (curl: -F file=@PATH)"),
        (form | {"expires_after[seconds]": (None, "9")}, 400, "expires_after.seconds", "`int` >= 3600"),
        (form | {"expires_after[seconds]": (None, "7200")}, 400, "expires_after.anchor", "missing required field"),
        (form | {"file": ("a", bytes(QUOTA_BYTES + 1))}, 429, "file", f"{QUOTA_BYTES} bytes together: delete some"),
    ]
    for files, status, param, words in cases:
        answer = await served.http[0].post("/v1/files", files=files)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param) and words in error["message"]
    answer = await served.http[0].post("/v1/files", json={})
    assert answer.status_code == 415 and "send a form, multipart/form-data" in answer.text
    cut = {"content-type": "multipart/form-data; boundary=bb"}
    head = b'--bb\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ntext'
    answer = await served.http[0].post("/v1/files", content=head, headers=cut)
    assert answer.status_code == 400 and "the form ends in the midst of file" in answer.text
    assert list(served.folder.iterdir()) == [] and (await served.http[0].get("/v1/files")).json()["data"] == []


FIELDS: Form = {"purpose": (None, "batch"), "porpose": (None, "x"), "file": ("a", b"{}")}


@in_loop(serving)
async def test_unknown_fields_are_ignored_with_a_warning(served: Served) -> None:
    answer = await served.http[0].post("/v1/files", files=FIELDS)
    assert answer.status_code == 200 and "porpose" in answer.headers["warning"]


@in_loop(partial(serving, is_strict=True))
async def test_unknown_fields_are_refused_with_strict_fields(served: Served) -> None:
    answer = await served.http[0].post("/v1/files", files=FIELDS)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unknown_field"


@in_loop(serving)
async def test_a_client_that_leaves_amid_its_upload_leaves_nothing(served: Served) -> None:
    begun = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b'--bb\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(100_000)
        begun.set()

    messages = [{"type": "http.request", "body": data, "more_body": True} async for data in half()]
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    async def send(message: object) -> None:
        raise AssertionError("nobody reads an answer")

    headers = [(b"authorization", b"Bearer sk-one"), (b"content-type", b"multipart/form-data; boundary=bb")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "headers": headers}
    await served.app(scope, receive, send)
    assert list(served.folder.iterdir()) == []


@in_loop(partial(serving, has_folder=False))
async def test_without_a_folder_the_remedy_is_said(served: Served) -> None:
    answer = await served.http[0].get("/v1/files")
    assert answer.status_code == 400 and "start with --state-dir DIR" in answer.json()["error"]["message"]
