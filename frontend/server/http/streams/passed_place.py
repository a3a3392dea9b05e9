"""PassedPlace: the part of another frontend's stream that a reader has, by the ids of the events passed on."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .....ipc.codec import encode_ids
from .....ipc.messages.client import Delta
from ...api.continuation import Continuation
from .reader import END
from .stream import Place, Position


class PassedPlace:
    """A position. It is in the journal as so many tokens, whichever they are; one is called cached once all is over."""

    def __init__(self, position: Position, reader: Continuation) -> None:
        """`reader`: the continuation of its request."""
        position.move_past(reader)
        self._position, self.is_over = position, reader.num_cached > 0

    def parameters(self) -> Mapping[str, str]:
        return {"after": str(self._position)}

    def move_past(self, part: bytes, continuation: Continuation) -> None:
        _, mark, rest = (b"\n" + part).rpartition(b"\nid: ")
        place = rest.partition(b"\n")[0].rpartition(b"/")[2].decode()
        if not mark:
            return
        if place == END:
            self.is_over = True
            continuation.rendered_cached = 1
            return
        before, self._position = self._position, Position.parse(place)
        for choice, found in self._position.places.items():
            known = before.places.get(choice) or Place()
            shown = Delta(request_id="", token_ids=encode_ids([0] * (found.num_tokens - known.num_tokens)))
            if found.has_end and not known.has_end:
                shown = msgspec.structs.replace(shown, finish_reason="stop")
            if shown.token_ids or shown.finish_reason:
                continuation.rendered.append((choice, shown))
        continuation.num_events = self._position.num_events
