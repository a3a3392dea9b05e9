"""ResponseEndpoints: retrieve, cancel and delete stored responses, list their input items, and count input tokens."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.codec import JsonObject, num_ids
from ....ipc.errors import RequestError
from ...forms.openai.errors import json_response
from ...forms.openai.messages import with_allowed_tools
from ...forms.openai.params import schema_errors_about
from ...forms.openai.response_body import ResponsesRequest, chat_request, schema_field
from ...state.responses import Record
from ..api.continuation import Continuation, current
from ..api.openai.chat import chat_params
from ..api.openai.events import EventStream
from ..api.openai.local_engine import LocalEngine
from ..api.openai.responses import item_prefix
from ..api.openai.stored_responses import StoredResponses
from ..bodies.body_parser import ParsedBody
from .endpoint import AnyBody, Endpoint
from .peers import PASSED_ON, Peers

MAX_LISTED = 100  # items per page; OpenAI's limit


class ResponseEndpoints:
    """Handlers for stored responses, and for the token count of an input."""

    def __init__(self, engine: LocalEngine, responses: StoredResponses, peers: Peers) -> None:
        self._engine, self._responses, self._peers = engine, responses, peers

    def endpoints(self) -> list[Endpoint]:
        one = "/v1/responses/{response_id}"
        return [
            Endpoint("/v1/responses/input_tokens", self.count, "Token count of an input", ResponsesRequest),
            Endpoint(one, self.retrieve, "A stored response, or its events: ?stream=true"),
            Endpoint(one, self.delete, "Delete a response", other_method="DELETE"),
            Endpoint(f"{one}/cancel", self.cancel, "Cancel a background response", AnyBody),
            Endpoint(f"{one}/input_items", self.list_items, "Input items of a response: ?limit=20&order=desc&after=ID"),
        ]

    async def retrieve(self, request: Request) -> Response:
        record = await self._responses.find(request.path_params["response_id"])
        if request.query_params.get("stream", "false").lower() != "true":
            return Response(record.response, media_type="application/json")
        after = _number(request, "starting_after", -1)
        if after < -1:
            raise RequestError(
                f"starting_after must be 0 or more, got {after}: leave it out to begin with the first event"
            )
        if self._is_elsewhere(record, request):
            return await self._peers.follow(request, record.owner, _EventsPlace(after))
        return EventStream(await self._responses.follow(record, after), bytes)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        record = await self._responses.find(response_id)
        if self._is_elsewhere(record, request):
            return await self._peers.ask(request, record.owner)
        await self._responses.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        record = await self._responses.find(request.path_params["response_id"])
        if self._is_elsewhere(record, request):
            return await self._peers.ask(request, record.owner)
        return Response(await self._responses.cancel(record.id), media_type="application/json")

    def _is_elsewhere(self, record: Record, request: Request) -> bool:
        """Whether another frontend is generating the response in the background."""
        return record.is_open and record.owner != self._peers.index and PASSED_ON not in request.headers

    async def list_items(self, request: Request) -> Response:
        """Return one page of a response's input items, newest first unless `order` is asc. RequestError for an invalid
        parameter."""
        record = await self._responses.find(request.path_params["response_id"])
        items: list[JsonObject] = msgspec.json.decode(record.items)
        unique = item_prefix(record.id)
        items = [
            {"id": f"item_{unique}_{index}", "type": "message", **_in_parts(item)} for index, item in enumerate(items)
        ]
        limit, after = _number(request, "limit", 20), request.query_params.get("after")
        if not 1 <= limit <= MAX_LISTED:
            raise RequestError(f"limit must be in [1, {MAX_LISTED}], got {limit}")
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order!r:.80}")
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError(f"after is {after!r:.80}, which is not an item of this response")
            items = items[ids.index(after) + 1 :]
        shown = items[:limit]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        listed = {"object": "list", "data": shown, "has_more": len(items) > limit}
        return json_response(listed | {"first_id": first, "last_id": last})

    async def count(self, request: Request) -> Response:
        parsed = await self._engine.bodies.read(request, ResponsesRequest)
        await self._engine.model_of(parsed.body)
        parsed = await self._responses.with_previous(parsed)
        chat = chat_request(parsed.body)
        with schema_errors_about(schema_field(parsed.body)):
            chat_params(with_allowed_tools(chat))  # raises the errors that POST /v1/responses would raise
        token_ids = await self._engine.chat_tokens(ParsedBody(chat, parsed.inputs))
        return json_response({"object": "response.input_tokens", "input_tokens": num_ids(token_ids)})


class _EventsPlace:
    """Place in the events of a response: sequence numbers."""

    is_over = False  # after the last event there are none

    def __init__(self, after: int) -> None:
        self._after, self._num_before = after, current().num_events

    def parameters(self) -> Mapping[str, str]:
        last = self._after + self._num_before
        return {"starting_after": str(last)} if last >= 0 else {}

    def move_past(self, part: bytes, continuation: Continuation) -> None:
        self._num_before += part.count(b"\ndata: ")  # each event has a name before its data
        continuation.num_events = self._num_before


def _in_parts(item: JsonObject) -> JsonObject:
    """Return the item with its text content, if it has one, replaced by a list with one text part."""
    if not isinstance(text := item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return item | {"content": [{"type": kind, "text": text}]}


def _number(request: Request, name: str, default: int) -> int:
    """Return an integer query parameter, or `default` if it is absent; RequestError if it is not an integer."""
    given = request.query_params.get(name)
    try:
        return default if given is None else int(given)
    except ValueError:
        raise RequestError(f"{name} must be a whole number, got {given!r:.80}") from None
