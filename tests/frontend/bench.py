"""Bench: a Frontend; the test plays its clock, core and clients."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tokenloom.frontend.server.requests.frontend import Frontend
from tokenloom.frontend.server.requests.media.media_input import MediaInput
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import Decoder, encode, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Ping, Unknown, Welcome
from tokenloom.ipc.messages.client import ClientMessage, Delta, Deltas, FrontendMessage, Submit
from tokenloom.ipc.messages.core import AbortRequests, EngineCoreOutputs, EngineCoreRequest
from tokenloom.ipc.notes.deadly import ReadingNote
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.frontend.server.text.samples import new_tokenizer
from tokenloom.tests.support.engine_specs import new_spec

DEADLINE_S = 20.0
TOKENIZER = new_tokenizer("byte_level")
WELCOME = Welcome(protocol_version=PROTOCOL_VERSION, run_id="r")
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})


class Bench:
    """A Frontend with the test as clock, core and clients; client c has sent Hello."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = TOKENIZER,
        media: MediaInput | None = None,
        seeing: EngineSpec | None = None,
        note: ReadingNote | None = None,
        **spec: Any,
    ) -> None:
        """`seeing`: the specification of a model that takes media by `media`. `note`: as a Frontend's."""
        self.now = 100.0
        self.is_awake = threading.Event()
        self.frontend = Frontend(
            seeing or new_spec(**spec),
            tokenizer,
            TEMPLATE,
            self.is_awake.set,
            media,
            note,
            monotonic=lambda: self.now,
            unix_time=lambda: self.now + 1e9,
        )
        self.to_core: list[Any] = []
        self.num_core_pings = 0
        self.messages_by_client: dict[bytes, list[FrontendMessage]] = {}
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self.frontend.connect()
        self.frontend.on_core_message(WELCOME)
        self.turn()
        self.hello()
        self.to_core.clear()

    def turn(self) -> None:
        self.frontend.tick(self.now)
        for identity, frame in self.frontend.outbox.to_clients:
            self.messages_by_client.setdefault(identity, []).append(self._decoder.decode(frame))
        self.to_core += [message for message in self.frontend.outbox.to_cores[0] if not isinstance(message, Ping)]
        self.num_core_pings += sum(isinstance(message, Ping) for message in self.frontend.outbox.to_cores[0])
        self.frontend.outbox.to_clients.clear()
        self.frontend.outbox.to_cores[0].clear()

    def wait(self, seconds: float) -> None:
        """Advance the clock in turns of a healthy loop."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.turn()

    def wait_for_wakeup(self) -> None:
        """Wait for a background job, then run a turn."""
        assert self.is_awake.wait(DEADLINE_S)
        self.is_awake.clear()
        self.frontend.on_wakeup()
        self.turn()

    def say(self, *messages: ClientMessage, client: bytes = b"c") -> list[FrontendMessage]:
        """Send messages of a client in one turn; return and remove the messages to it."""
        for message in messages:
            self.frontend.on_client_frame(client, encode(message))
        self.turn()
        return self.heard(client)

    def hello(self, client: bytes = b"c") -> None:
        assert isinstance(self.say(Hello(protocol_version=PROTOCOL_VERSION), client=client)[-1], Welcome)

    def heard(self, client: bytes = b"c") -> list[FrontendMessage]:
        return self.messages_by_client.pop(client, [])

    def deltas(self, client: bytes = b"c") -> list[Delta]:
        return deltas_of(self.heard(client))

    def news(self, *messages: ClientMessage, client: bytes = b"c") -> list[Delta]:
        """Send messages of a client in one turn; return its deltas."""
        return deltas_of(self.say(*messages, client=client))

    def core(self, **columns: Any) -> None:
        """Receive a message of the core and end the turn."""
        self.frontend.on_core_message(EngineCoreOutputs(**columns))
        self.turn()

    def tokens(self, *entries: tuple[int, int, Sequence[int]], **more: Any) -> None:
        """Send tokens of the core as (key, start, ids)."""
        self.core(
            keys=encode_ids(key for key, _, _ in entries),
            starts=encode_ids(start for _, start, _ in entries),
            counts=encode_ids(len(ids) for _, _, ids in entries),
            token_ids=encode_ids(token_id for _, _, ids in entries for token_id in ids),
            **more,
        )

    def ask(self, *messages: ClientMessage) -> list[FrontendMessage]:
        """Send messages and return as many replies, in the order in which they come."""
        replies = self.say(*messages)
        while len(replies) < len(messages):
            self.wait_for_wakeup()
            replies += self.heard()
        return replies

    def refusal(self, *messages: ClientMessage) -> ErrorInfo:
        """Return the error of the one request that ends."""
        (delta,) = deltas_of(self.ask(*messages))
        assert delta.finish_reason == "error" and delta.error is not None
        return delta.error

    def core_request(self, request_id: str = "r", client: bytes = b"c", **fields: Any) -> EngineCoreRequest:
        """Submit a request, and return it as the core gets it."""
        num_known = len(self.to_core)
        self.frontend.on_client_frame(client, encode(new_submit(request_id, **fields)))
        self.turn()
        while True:
            for message in self.to_core[num_known:]:
                if isinstance(message, EngineCoreRequest):
                    return message
            self.wait_for_wakeup()

    def submit(self, request_id: str = "r", client: bytes = b"c", **fields: Any) -> int:
        """Submit a request and accept it as the core; return its key."""
        key = self.core_request(request_id, client, **fields).children[0].key
        self.core(accepted=[key])
        self.heard(client)
        return key

    def restart_core(self) -> EngineCoreRequest:
        """Let the core forget the frontend; return the last request that it gets then."""
        self.to_core.clear()
        self.frontend.on_core_message(Unknown())
        self.frontend.on_core_message(WELCOME)
        self.turn()
        request = self.to_core[-1]
        assert isinstance(request, EngineCoreRequest)
        return request

    def aborted(self) -> list[int]:
        keys = [key for message in self.to_core if isinstance(message, AbortRequests) for key in message.keys]
        self.to_core.clear()
        return keys


def new_submit(request_id: str = "r", **fields: Any) -> Submit:
    params = SamplingParams(**fields.pop("params", {}))
    if not fields.keys() & {"prompt", "prompt_token_ids", "chat"}:
        fields["prompt"] = "The capital"
    return Submit(request_id=request_id, params=params, **fields)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def deltas_of(messages: list[FrontendMessage]) -> list[Delta]:
    return [delta for message in messages if isinstance(message, Deltas) for delta in message.deltas]
