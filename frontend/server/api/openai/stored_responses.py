"""StoredResponses: creates, continues, stores and cancels responses of /v1/responses.

All clients share one store. A response's id contains a secret, which alone protects the response from other clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from .....ipc.errors import InternalError, RequestError, TokenloomError
from ....forms.openai.errors import HttpError, encode_json
from ....forms.openai.response_body import ResponsesRequest
from ....state.responses import MAX_RECORD_BYTES, Record, ResponseStore
from ...bodies.body_parser import ParsedBody
from ..continuation import current
from .background_response import BackgroundResponse
from .chat import ChatCompletion
from .local_engine import LocalEngine
from .responses import ResponseCreation

logger = logging.getLogger("tokenloom.http")

Fields = dict[str, msgspec.Raw]  # fields of a body, undecoded
_DIGEST = "adapter_digest"  # key added to a stored request's fields: digest in hex, empty without an adapter
_MEDIA = "media_digests"  # likewise: digests of the bytes of its media in hex, once its events begin
_WEIGHTS = "weights_digest"  # likewise: digest of the model's weights
NewChat = Callable[[ParsedBody[ResponsesRequest], str], Awaitable[tuple[ResponsesRequest, ChatCompletion]]]


class StoredResponses:
    """Creator of all responses, and owner of the background responses that are being generated. Call `resume` first."""

    def __init__(self, engine: LocalEngine, store: ResponseStore, new_chat: NewChat, weights: str) -> None:
        """`new_chat` returns the body completed with the defaults of the model that it names, and the chat that answers
        it. `weights`: digest of the model's weights; empty if it is unknown."""
        self._engine, self._store, self._new_chat = engine, store, new_chat
        self._weights = weights
        self._running: dict[str, BackgroundResponse] = {}

    async def resume(self) -> None:
        """Continue the background responses that the previous frontend left open; log a warning if the store fails."""
        if not self._store.is_on or not self._store.exists:
            return
        try:
            for record in await self._store.take_open():
                is_streamed = msgspec.json.decode(record.request).get("stream")
                stored = await self._store.events(record.id) if is_streamed else None
                self._run(record, partial(self._recreate, record), stored)
        except TokenloomError as error:
            logger.warning("responses of an earlier frontend are lost: %s", error)

    async def start(self, parsed: ParsedBody[ResponsesRequest], model: str) -> ResponseCreation | BackgroundResponse:
        """Check a request and return its response. A background response is also stored and started.

        HttpError 400 if a background response may not be stored, Overloaded or InternalError if that fails; the errors
        of `with_previous`, and RequestError for an invalid field."""
        body = parsed.body
        parsed = await self.with_previous(parsed)
        is_kept = body.store is not False and self._store.is_on and 0 < len(parsed.raw) <= MAX_RECORD_BYTES
        if body.background and not is_kept:
            why = f", which it is not for a body of more than {MAX_RECORD_BYTES} bytes: send less"
            if not self._store.is_on:
                why = ", and --response-store-bytes is 0: raise it"
            why = "" if body.store is False else why
            raise HttpError(400, f"background can only be used when `store` is true{why}", param="background")
        if body.background:
            seed = parsed.body.seed
            if seed is None:
                seed = int.from_bytes(current().draw("seed", 4)) >> 1
            parsed = parsed._replace(body=msgspec.structs.replace(parsed.body, seed=seed))
        whole, chat = await self._new_chat(parsed, model)
        shown = msgspec.structs.replace(whole, previous_response_id=body.previous_response_id)
        keep = partial(self._keep, parsed.raw) if is_kept and not body.background else None
        creation = ResponseCreation(self._engine, shown, chat, keep)
        if not body.background:
            return creation
        chat.goes_on = False  # its events are stored
        if (begun := await self._begun(creation.id)) is not None:
            return begun
        self._engine.check_id(chat.id)
        fields, items = conversation(parsed.raw)
        digest = self._engine.adapter_digest(model)
        chat.pin_adapter(digest)
        given = {"request_id": chat.id.partition("-")[2], "seed": seed, _DIGEST: digest.hex()}
        given[_WEIGHTS] = self._weights
        request = fields | {name: msgspec.Raw(encode_json(value)) for name, value in given.items()}
        response = encode_json(creation.response("queued"))
        record = Record(creation.id, True, True, encode_json(items), encode_json(request), response)
        await self._store.add(record)
        creation.on_media = partial(self._note_media, record.id, request)

        async def created() -> ResponseCreation:
            return creation

        return self._run(record, created, [] if body.stream else None)

    async def with_previous(self, parsed: ParsedBody[ResponsesRequest]) -> ParsedBody[ResponsesRequest]:
        """Return the body with the conversation of previous_response_id, if that is given, before its own input.

        HttpError 400 if that response is not stored; RequestError if it has not ended, or if the body is longer than
        MAX_RECORD_BYTES."""
        previous_id = parsed.body.previous_response_id
        if previous_id is None:
            return parsed
        record = await self._store.get(previous_id)
        if record is None:
            message = f"Previous response with id '{previous_id:.200}' not found."
            raise HttpError(400, message, param="previous_response_id", code="previous_response_not_found")
        if record.is_open:
            raise RequestError(f"previous_response_id: {previous_id} has not ended: wait until it has, or cancel it")
        if not parsed.raw:
            raise RequestError(f"previous_response_id cannot go with a body of more than {MAX_RECORD_BYTES} bytes")
        fields, items = conversation(parsed.raw)
        before = msgspec.json.decode(record.items, type=list[msgspec.Raw])
        output = msgspec.json.decode(record.response, type=Fields)["output"]
        fields["input"] = msgspec.Raw(
            encode_json([*before, *msgspec.json.decode(output, type=list[msgspec.Raw]), *items])
        )
        del fields["previous_response_id"]
        raw = encode_json(fields)
        joined = await self._engine.bodies.parse([raw], len(raw), ResponsesRequest, previous_id)
        return joined._replace(raw=raw)

    async def find(self, response_id: str) -> Record:
        """Return a stored response; HttpError 404 if it is not stored."""
        record = await self._store.get(response_id)
        if record is None:
            raise HttpError(404, f"Response with id '{response_id:.200}' not found.", param="response_id")
        return record

    async def follow(self, record: Record, after: int) -> AsyncGenerator[bytes, None]:
        """Return a generator of a background response's events after sequence number `after` (-1: all events).
        RequestError if the response is not a stream."""
        if (running := self._running.get(record.id)) is not None:
            return running.follow(after)
        stored = await self._store.events(record.id)
        if not stored:
            raise RequestError("stream needs a response in the background that was created with stream true")

        continuation = current()

        async def events() -> AsyncGenerator[bytes, None]:
            position = after + 1 + continuation.num_events
            continuation.num_events = len(stored) - after - 1
            yield b"".join(stored[position:])

        return events()

    async def cancel(self, response_id: str) -> bytes:
        """Cancel a background response unless it has ended, and return it as it is then stored (JSON). HttpError 404 if
        it is not stored, 400 if it is not a background response."""
        if not (await self.find(response_id)).is_background:
            raise HttpError(400, "Cannot cancel a synchronous response.", param="response_id")
        if (running := self._running.get(response_id)) is not None:
            await running.cancel()
        return (await self.find(response_id)).response

    async def delete(self, response_id: str) -> None:
        """Delete a response; cancel it first if it is in progress. HttpError 404 if it is not stored."""
        await self.find(response_id)
        if (running := self._running.get(response_id)) is not None:
            await running.cancel()
        await self._store.delete(response_id)

    async def _begun(self, response_id: str) -> BackgroundResponse | None:
        """Return the background response that an earlier frontend made for the present request; None if there is
        none."""
        if response_id in self._running:
            return self._running[response_id]
        record = await self._store.get(response_id)
        if record is None:
            return None
        stored = await self._store.events(response_id)
        ended = BackgroundResponse(self._store, msgspec.json.decode(record.response), _no_creation, stored or None)
        ended.finish()
        return ended

    def _run(
        self, record: Record, start: Callable[[], Awaitable[ResponseCreation]], stored: list[bytes] | None
    ) -> BackgroundResponse:
        response = msgspec.json.decode(record.response)
        running = self._running[record.id] = BackgroundResponse(self._store, response, start, stored)
        running.task = asyncio.create_task(running.run())
        running.task.add_done_callback(lambda _: self._running.pop(record.id, None))
        return running

    async def _recreate(self, record: Record) -> ResponseCreation:
        """Return a ResponseCreation that generates a response of an earlier frontend again, under the same id.
        InternalError if the engine serves another model now: it may have been started anew."""
        fields = msgspec.json.decode(record.request, type=Fields) | {"input": msgspec.Raw(record.items)}
        digest = bytes.fromhex(msgspec.json.decode(fields.pop(_DIGEST, b'""')))
        weights: str = msgspec.json.decode(fields.pop(_WEIGHTS, b'""'))
        media = msgspec.json.decode(fields.pop(_MEDIA, b"[]"), type=list[str])
        raw, before = encode_json(fields), msgspec.json.decode(record.response)
        parsed = await self._engine.bodies.parse([raw], len(raw), ResponsesRequest, record.id)
        body, chat = await self._new_chat(parsed, await self._same_model(before["model"], weights))
        chat.pin_adapter(digest)
        chat.pin_media([bytes.fromhex(each) for each in media])
        chat.goes_on = False
        body = msgspec.structs.replace(body, previous_response_id=before["previous_response_id"])
        creation = ResponseCreation(self._engine, body, chat, created=before["created_at"], given_id=record.id)
        if not media:
            creation.on_media = partial(self._note_media, record.id, msgspec.json.decode(record.request, type=Fields))
        return creation

    async def _note_media(self, response_id: str, request: Fields, digests: list[bytes]) -> None:
        """Store which media a response was made of, before any of its events: should it be made again, it has to be of
        these."""
        shown = msgspec.Raw(encode_json([each.hex() for each in digests]))
        await self._store.set_request(response_id, encode_json(request | {_MEDIA: shown}))

    async def _same_model(self, name: str, weights: str) -> str:
        """Return the present name of the model, or of the adapter, that began a response. InternalError if it is not
        served now."""
        other = f"the model {name:.200} that began this response is not served now: send the request again"
        if weights and self._weights and weights != self._weights:
            raise InternalError(other)
        try:
            return await self._engine.model_of(ResponsesRequest(model=name, input=""))
        except HttpError:
            raise InternalError(other) from None

    async def _keep(self, raw: bytes, response: dict[str, Any]) -> bool:
        """Store a response and return True. If the store fails or is full, log a warning and return False; the client
        still gets the response."""
        _, items = conversation(raw)
        try:
            is_repeated = current().was_begun or current().num_losses > 0
            if is_repeated and await self._store.get(response["id"]) is not None:
                return True  # an earlier frontend did not live to send the end
            await self._store.add(
                Record(response["id"], False, False, encode_json(items), b"", encode_json(response | {"store": True}))
            )
        except TokenloomError as error:
            logger.warning("a response is not stored: %s", error)
            return False
        return True


async def _no_creation() -> ResponseCreation:
    raise AssertionError("an ended response is not generated")


def conversation(raw: bytes) -> tuple[Fields, list[msgspec.Raw]]:
    """Return the fields of a body except `input`, and the input as a list of items. Text becomes one user message."""
    fields = msgspec.json.decode(raw, type=Fields)
    given = fields.pop("input")
    if bytes(memoryview(given)[:1]) == b"[":
        return fields, msgspec.json.decode(given, type=list[msgspec.Raw])
    content = [{"type": "input_text", "text": given}]
    return fields, [msgspec.Raw(encode_json({"type": "message", "role": "user", "content": content}))]
