"""StreamEndpoints: /v1/streams/ID, by which a client reads on in a stream that it has left, or stops it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .....ipc.digits import whole_number
from ....forms.openai.errors import HttpError, json_response
from ...api.continuation import current
from ...api.openai.events import only_end
from ..endpoint import Endpoint
from ..peers import PASSED_ON, Peers
from .passed_place import PassedPlace
from .reader import END
from .resumable import ResumableStreams
from .stream import Position, ResumableStream


class StreamEndpoints:
    """Handlers of resumable streams. Another frontend's streams are passed on to it."""

    def __init__(self, streams: ResumableStreams, peers: Peers) -> None:
        self._streams, self._peers = streams, peers

    def endpoints(self) -> list[Endpoint]:
        one = "/v1/streams/{stream_id}"
        return [
            Endpoint(one, self.read, "The rest of a stream: ?after=POSITION", media_type="text/event-stream"),
            Endpoint(one, self.delete, "Stop a stream", other_method="DELETE"),
        ]

    async def read(self, request: Request) -> Response:
        owner, stream_id = self._owner(request), request.path_params["stream_id"]
        given = request.headers.get("last-event-id", "")
        after = given.removeprefix(f"{stream_id}/") or request.query_params.get("after", "0.0")
        if owner is not None:
            if after == END:
                return await self._peers.ask(request, owner)
            place = PassedPlace(Position.parse(after), current())
            return only_end() if place.is_over else await self._peers.follow(request, owner, place)
        stream = self._find(request)
        if after == END:
            return only_end()
        position = Position.parse(after)
        stream.check(position)  # before the present reader has to leave
        return _Rest(self._streams, stream, position)

    async def delete(self, request: Request) -> Response:
        owner = self._owner(request)
        if owner is not None:
            return await self._peers.ask(request, owner)
        stream = self._find(request)
        await self._streams.delete(stream)
        return json_response({"id": stream.id, "object": "stream", "deleted": True})

    def _owner(self, request: Request) -> int | None:
        """Return the other frontend to which the request is passed on; None: this one answers it."""
        number = whole_number(str(request.path_params["stream_id"]).partition("-")[0])
        is_elsewhere = number in self._peers.others and PASSED_ON not in request.headers
        return number if is_elsewhere else None

    def _find(self, request: Request) -> ResumableStream:
        stream_id = request.path_params["stream_id"]
        stream = self._streams.by_id.get(stream_id)
        if stream is None:
            raise HttpError(404, f"there is no stream {stream_id!r:.80}: it was not begun here, or its time is over")
        return stream


class _Rest(Response):
    """The rest of a stream, behind a position."""

    def __init__(self, streams: ResumableStreams, stream: ResumableStream, position: Position) -> None:
        self._streams, self._stream, self._position = streams, stream, position
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._streams.read(self._stream, self._position, scope, receive, send)
