"""/v1/batches is OpenAI's: its client runs a whole batch unpatched, and errors have its form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.listening.keys.api_keys import ApiKeys
from tokenloom.frontend.server.api.openai.body_reader import BodyReader
from tokenloom.frontend.server.helpers.intake import new_intake_helper
from tokenloom.frontend.server.helpers.pool import HelperPool
from tokenloom.frontend.server.http.batches.clerk import BatchClerk
from tokenloom.frontend.server.http.batches.endpoints import BatchEndpoints
from tokenloom.frontend.server.http.batches.runner import BatchRunner, RunnerLimits
from tokenloom.frontend.server.http.endpoint import routes
from tokenloom.frontend.server.http.files.endpoints import FileEndpoints
from tokenloom.frontend.server.http.middleware import HttpMiddleware
from tokenloom.frontend.server.http.peers import Peers
from tokenloom.frontend.server.metrics.batch_metrics import BatchMetrics
from tokenloom.frontend.state.batches.store import MAX_OPEN, Batches, reader_of
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.files import Files
from tokenloom.frontend.state.schema import FILE
from tokenloom.tests.frontend.server.http.batches.test_runner import App, check
from tokenloom.tests.frontend.server.http.served_app import AppTransport
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.in_loop import in_loop

KEYS = ("sk-one", "sk-two")
PATH = "/v1/completions"
QUOTA_BYTES = 10_000_000


class Served:
    """The app of files and batches in a folder, with a runner whose requests a scripted app answers."""

    def __init__(self, folder: Path) -> None:
        (folder / "files").mkdir()
        spec = new_spec(run_directory=str(folder))
        self.database = Database(folder / FILE, is_durable=True)
        self.files = Files(self.database, folder / "files", QUOTA_BYTES, [reader_of])
        self.batches, self.metrics = Batches(self.database), BatchMetrics()
        self.answers, self.gate = App(), asyncio.Event()
        self.gate.set()
        clerk = BatchClerk(self.batches, self.files, check, 100_000)
        limits = RunnerLimits(max_open=4, gather_s=0.0)
        now = self.database.clock.now
        self.runner = BatchRunner(self.batches, self.files, clerk, limits, "m", self.metrics, lambda: False, now)
        self.pool = HelperPool(lambda: None, partial(new_intake_helper, spec))
        bodies = BodyReader(self.pool, None)  # type: ignore[arg-type]
        endpoints = BatchEndpoints(
            bodies, self.batches, self.files, self.runner, Peers(spec, 0), frozenset((PATH,)), "m", now
        )
        files = FileEndpoints(self.files, is_strict=False)
        router = Router(routes([*files.endpoints(), *endpoints.endpoints()]))
        self.app = HttpMiddleware(router, ApiKeys(KEYS), 100_000, lambda why: None)
        self.task = asyncio.ensure_future(self.runner.run(self._answer))
        self.client, self.other = map(self._client, KEYS)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gate.wait()
        await self.answers(scope, receive, send)

    def _client(self, key: str) -> openai.AsyncOpenAI:
        http = httpx2.AsyncClient(transport=AppTransport(self.app), base_url="http://app")
        return openai.AsyncOpenAI(base_url="http://app/v1", api_key=key, max_retries=0, http_client=http)

    async def upload(self, *lines: dict[str, Any] | bytes, client: openai.AsyncOpenAI | None = None) -> str:
        data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        created = await (client or self.client).files.create(file=("in.jsonl", data), purpose="batch")
        return created.id

    async def create(self, file_id: str, **fields: Any) -> openai.types.Batch:
        given: dict[str, Any] = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
        return await self.client.batches.create(**given | fields)

    async def wait(self, batch_id: str, is_there: Callable[[openai.types.Batch], bool]) -> openai.types.Batch:
        while not is_there(batch := await self.client.batches.retrieve(batch_id)):
            await asyncio.sleep(0.01)
        return batch

    async def ended(self, batch_id: str) -> openai.types.Batch:
        return await self.wait(batch_id, lambda batch: batch.status in ("completed", "failed", "expired", "cancelled"))

    async def content(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        return [json.loads(line) for line in (await self.client.files.content(file_id)).content.splitlines()]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.pool.close()
        self.files.close()
        self.database.close()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    served = Served(folder)
    try:
        async with asyncio.timeout(30):
            yield served
    finally:
        await served.close()


def line(name: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": PATH, "body": {"prompt": name}} | changes


@in_loop(serving)
async def test_the_client_runs_a_whole_batch(served: Served) -> None:
    served.answers.statuses = {"b": [400]}
    client = served.client
    file_id = await served.upload(*map(line, "abc"))
    created = await served.create(
        file_id, metadata={"k": "v"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (created.status, created.object, created.metadata) == ("validating", "batch", {"k": "v"})
    assert created.expires_at == created.created_at + 24 * 3600
    batch = await served.ended(created.id)
    assert batch.status == "completed" and batch.request_counts is not None and batch.usage is not None
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.request_counts.total) == (2, 1, 3)
    assert batch.usage.total_tokens == 16 and batch.model == "m"
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    assert [each["custom_id"] for each in await served.content(batch.output_file_id)] == ["a", "c"]
    [error] = await served.content(batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("b", 400, None)
    output = await client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output" and output.expires_at == output.created_at + 3600
    assert (await client.files.delete(file_id)).deleted
    assert served.metrics.lines.get("completed") == 2 and served.metrics.lines.get("failed") == 1


@in_loop(serving)
async def test_lists_have_pages_and_another_keys_batches_do_not_exist(served: Served) -> None:
    file_id = await served.upload(line("a"))
    ids = [(await served.create(file_id)).id for _ in range(5)]
    seen = [batch.id async for batch in await served.client.batches.list(limit=2)]
    assert seen == ids[::-1]
    assert (await served.other.batches.list()).data == []
    for ask in (served.other.batches.retrieve, served.other.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="No batch found with id"):
            await ask(ids[0])
    with pytest.raises(openai.BadRequestError, match="no file of purpose batch"):
        await served.other.batches.create(input_file_id=file_id, endpoint=PATH, completion_window="24h")


@pytest.mark.parametrize("limit", ["0", "101", "-1", "a", "²", "9" * 5000])
@in_loop(serving)
async def test_a_page_has_1_to_100_batches(served: Served, limit: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"limit must be in \[1, 100\], got"):
        await served.client.batches.list(extra_query={"limit": limit})


@in_loop(serving)
async def test_a_running_batch_holds_its_file_until_it_is_cancelled(served: Served) -> None:
    served.gate.clear()
    file_id = await served.upload(*map(line, "abcdefgh"))
    batch = await served.create(file_id)
    await served.wait(batch.id, lambda it: it.status == "in_progress")
    with pytest.raises(openai.ConflictError, match=batch.id):
        await served.client.files.delete(file_id)
    assert (await served.client.batches.cancel(batch.id)).status == "cancelling"
    ended = await served.ended(batch.id)
    assert ended.status == "cancelled" and ended.output_file_id is None and ended.cancelled_at
    codes = {each["error"]["code"] for each in await served.content(ended.error_file_id)}
    assert codes == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="status 'cancelled'"):
        await served.client.batches.cancel(batch.id)
    assert (await served.client.files.delete(file_id)).deleted


@in_loop(serving)
async def test_each_fault_of_a_file_is_told_by_its_line_with_the_mend(served: Served) -> None:
    lines: tuple[dict[str, Any] | bytes, ...] = (
        line("a"),
        b"{\n",
        b"\n",
        line("a"),
        line("b", url="/v1/embeddings"),
        line("c", method="GET"),
        line("d", body={"prompt": "x", "stream": True}),
        {"custom_id": "e", "method": "POST", "url": PATH},
        line("f", body={"prompt": "x" * 200_000}),
    )
    batch = await served.ended((await served.create(await served.upload(*lines))).id)
    assert batch.status == "failed" and batch.failed_at and batch.errors is not None and batch.errors.data is not None
    found = [(each.line, each.code, each.param) for each in batch.errors.data]
    assert found == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_url", "url"),
        (6, "invalid_method", "method"),
        (7, "invalid_request", "body.stream"),
        (8, "missing_required_parameter", "body"),
        (9, "invalid_request", None),
    ]
    assert all(each.message and ": " in each.message for each in batch.errors.data)
    assert served.answers.computed.total() == 0
    empty = await served.ended((await served.create(await served.upload(b"\n\n"))).id)
    assert empty.errors is not None and empty.errors.data is not None and empty.errors.data[0].code == "empty_file"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "23m"}, "completion_window"),
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
    ],
)
@in_loop(serving)
async def test_a_batch_that_cannot_run_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    given = {"file_id": await served.upload(line("a"))} | fields
    given["file_id"] = given.pop("input_file_id", given["file_id"])
    with pytest.raises(openai.BadRequestError) as refused:
        await served.create(**given)
    assert refused.value.param == param


@in_loop(serving)
async def test_a_key_has_a_bounded_number_of_open_batches(served: Served) -> None:
    served.gate.clear()
    file_id = await served.upload(line("a"))
    for _ in range(MAX_OPEN):
        await served.create(file_id)
    with pytest.raises(openai.RateLimitError, match=f"{MAX_OPEN} batches"):
        await served.create(file_id)
    served.gate.set()
    page = await served.client.batches.list(limit=100)
    await served.ended(page.data[-1].id)
    await served.create(file_id)
