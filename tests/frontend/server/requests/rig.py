"""A conversation and a frontend, with messages delivered by the test."""

from __future__ import annotations

from tokenloom.frontend.client.open_request import OpenRequest, Update
from tokenloom.frontend.client.outputs import OutputBuilder
from tokenloom.frontend.client.protocol import ClientProtocol
from tokenloom.ipc.messages.base import Welcome
from tokenloom.ipc.messages.client import Accepted, ClientMessage, FrontendMessage, Submit
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.frontend.fake_frontend import FakeService, answer_tokens, prompt_ids, text_of

IDENTITY = bytes(16)
HELLO = Welcome(protocol_version=1, run_id="run-1")


def accepted(request_id: str = "a", seed: int = 1) -> Accepted:
    return Accepted(request_id=request_id, attempt=0, prompt_token_ids=b"", prompt=None, seed=seed)


class Rig:
    """Messages wait in `to_frontend` and in the service's outbox until `carry` or `settle`. Tests set `now`."""

    def __init__(self, **limits: int) -> None:
        self.to_frontend: list[ClientMessage] = []
        self.protocol = ClientProtocol("ipc://here", self.to_frontend.append, 10.0, 30.0, **limits)
        self.service = FakeService()
        self.now = 0.0
        self.updates: dict[str, list[Update]] = {}
        self.protocol.greet(self.now)

    def submit(self, request_id: str, prompt: str = "p", adapter: str = "", **params: object) -> Submit:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        submit = Submit(request_id=request_id, prompt=prompt, params=sampling, adapter=adapter)
        self.updates[request_id] = []
        self.protocol.submit(OpenRequest(submit, self.updates[request_id].append))
        return submit

    def hear(self, *messages: FrontendMessage) -> None:
        for message in messages:
            self.protocol.receive(message, self.now)

    def reopen(self) -> None:
        """Reconnect; undelivered messages are lost."""
        self.to_frontend.clear()
        self.service.outbox.clear()
        self.protocol.greet(self.now)

    def lose_sessions(self) -> None:
        """Reconnect to a frontend that knows no request."""
        self.service.sessions.clear()
        self.reopen()

    def serve(self) -> None:
        """Let the frontend go on after it has paused."""
        self.service.is_paused, self.service.max_deltas = False, None
        self.settle()

    def carry(self, num_up: int = 1 << 30, num_down: int = 1 << 30) -> None:
        """Deliver up to this many messages in each direction, in order."""
        for _ in range(min(num_up, len(self.to_frontend))):
            self.service.take(IDENTITY, self.to_frontend.pop(0))
        for _ in range(min(num_down, len(self.service.outbox))):
            self.hear(self.service.outbox.pop(0)[1])

    def settle(self, max_turns: int = 1000) -> None:
        for _ in range(max_turns):
            if self.protocol.needs_reconnect:
                self.reopen()
            self.carry()
            self.service.generate()
            if not (self.to_frontend or self.service.outbox or self.service.has_work):
                return
        raise AssertionError("messages are still exchanged")

    def sent(self, kind: type[ClientMessage]) -> list[ClientMessage]:
        return [message for message in self.to_frontend if isinstance(message, kind)]


def check_answer(submit: Submit, updates: list[Update]) -> None:
    builder = OutputBuilder(submit)
    for update in updates:
        assert not builder.is_finished, "nothing follows the last update"
        builder.add(update)
    assert builder.error is None
    output = builder.build()
    tokens = answer_tokens(prompt_ids(submit), 5, submit.params.max_tokens or 16)
    assert output.finished
    assert output.outputs[0].token_ids == tokens
    assert output.outputs[0].text == text_of(tokens)
    assert output.prompt == submit.prompt
