"""BatchEndpoints: create, list, retrieve and cancel batches, in OpenAI's form.

Every frontend answers from the database; frontend 0 runs the lines, and the others wake it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import NoReturn

from starlette.requests import Request
from starlette.responses import Response

from .....ipc.digits import whole_number
from .....ipc.errors import RequestError
from ....forms.openai.batches.batch import Batch, BatchRequest
from ....forms.openai.errors import HttpError, json_response
from ....state.batches.record import BatchRecord, IllegalMove
from ....state.batches.store import MAX_OPEN, Batches, StoredBatch
from ...api.openai.body_reader import BodyReader
from ..endpoint import AnyBody, Endpoint
from ..middleware import owner_of
from ..peers import Peers
from .clerk import BatchFiles
from .runner import BatchRunner

RUNNER = 0  # index of the frontend that runs the lines
WAKE_PATH = "/batches_changed"  # of frontend 0, for the others
MAX_LISTED = 100  # batches per page; OpenAI's limit
QUOTA_RETRY_S = 60


class BatchEndpoints:
    """Handlers of /v1/batches."""

    def __init__(
        self,
        bodies: BodyReader,
        batches: Batches,
        files: BatchFiles,
        runner: BatchRunner | None,
        peers: Peers,
        paths: frozenset[str],
        model: str,
        now: Callable[[], float],
    ) -> None:
        """`runner`: that of frontend 0. `paths`: those that a batch may be for. `model`: the name of the served model.
        `now`: by the clock of the state."""
        self._bodies, self._batches, self._files, self._runner = bodies, batches, files, runner
        self._peers, self._paths, self._model, self._now = peers, paths, model, now

    def endpoints(self) -> list[Endpoint]:
        one = "/v1/batches/{batch_id}"
        return [
            Endpoint("/v1/batches", self.create, "Run the requests of a file", BatchRequest),
            Endpoint("/v1/batches", self.list, "Batches, newest first: ?limit=20&after=ID"),
            Endpoint(one, self.retrieve, "A batch"),
            Endpoint(f"{one}/cancel", self.cancel, "End a batch with what it has", AnyBody),
            Endpoint(WAKE_PATH, self.wake, body_type=AnyBody),
        ]

    async def create(self, request: Request) -> Response:
        body = (await self._bodies.read(request, BatchRequest)).body
        body.check()
        if body.endpoint not in self._paths:
            raise HttpError(
                400,
                f"endpoint is {body.endpoint!r:.80}: give one of {', '.join(sorted(self._paths))}",
                param="endpoint",
            )
        owner = owner_of(request)
        if await self._files.input_path(owner, body.input_file_id) is None:
            message = f"no file of purpose batch has the id {body.input_file_id!r:.80}: upload it to /v1/files"
            raise HttpError(400, message, param="input_file_id")
        record = self._new_record(body)
        if not await self._batches.add(owner, record):
            message = f"{MAX_OPEN} batches of this key are open: wait until one is over, or cancel it"
            headers = {"retry-after": str(QUOTA_RETRY_S)}
            raise HttpError(429, message, "rate_limit_error", code="batch_limit_exceeded", headers=headers)
        await self._wake_runner(request)
        return json_response(record.batch)

    def _new_record(self, body: BatchRequest) -> BatchRecord:
        created = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=created,
            expires_at=created + body.window_s,
            metadata=body.metadata,
        )
        expiry = body.output_expires_after
        return BatchRecord(
            batch=batch,
            nonce=secrets.token_bytes(16),
            served_model=self._model,
            expires_at=self._now() + body.window_s,
            output_expires_s=None if expiry is None else expiry.seconds,
        )

    async def list(self, request: Request) -> Response:
        given = request.query_params.get("limit", "20")
        limit = whole_number(given)
        if limit is None or not 1 <= limit <= MAX_LISTED:
            raise RequestError(f"limit must be in [1, {MAX_LISTED}], got {given!r:.80}")
        after = request.query_params.get("after")
        page = await self._batches.page(owner_of(request), after, limit)
        if page is None:
            _refuse_unknown(after or "")
        data = [each.record.batch for each in page.batches]
        ends = {"first_id": data[0].id, "last_id": data[-1].id} if data else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": data, "has_more": page.has_more} | ends)

    async def retrieve(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return _shown(await self._batches.get(owner_of(request), batch_id), batch_id)

    async def cancel(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        try:
            found = await self._batches.cancel(owner_of(request), batch_id)
        except IllegalMove:
            found = await self._batches.get(owner_of(request), batch_id)
            status = "over" if found is None else found.record.batch.status
            raise HttpError(409, f"Cannot cancel a batch with status '{status}'.", param="batch_id") from None
        await self._wake_runner(request)
        return _shown(found, batch_id)

    async def wake(self, request: Request) -> Response:
        if self._runner is not None:
            self._runner.wake()
        return json_response({})

    async def _wake_runner(self, request: Request) -> None:
        """Let frontend 0 look at the batches. If it is being replaced, its successor looks at them anyway."""
        if self._runner is not None:
            self._runner.wake()
            return
        scope = {**request.scope, "path": WAKE_PATH, "raw_path": WAKE_PATH.encode(), "query_string": b""}
        with contextlib.suppress(HttpError):
            await self._peers.ask(Request(scope), RUNNER)


def _shown(found: StoredBatch | None, batch_id: str) -> Response:
    if found is None:
        _refuse_unknown(batch_id)
    return json_response(found.record.batch)


def _refuse_unknown(batch_id: str) -> NoReturn:
    raise HttpError(404, f"No batch found with id '{batch_id:.200}'.", param="batch_id")
