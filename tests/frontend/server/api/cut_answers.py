"""An app with answers that stop after any part and go on, without sockets; the test is the core and the journal.

The core writes a script for each prompt; an answer's last words depend on its seed, its adapter and its media. A turn
brings one token, or some.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.server.answer_forms.choose import Choice
from tokenloom.frontend.server.api.continuation import SHOWN, TOKENS, Answer, Continuation, Shown, working_on
from tokenloom.frontend.server.requests.media.media_input import MediaInput
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.core import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    KeyLogprobs,
    Started,
)
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.frontend.bench import TEMPLATE, TOKENIZER, ids
from tokenloom.tests.frontend.server.http.served_app import DEADLINE_S, ServedApp
from tokenloom.tests.support.engine_specs import in_folder, new_spec

EOS = 2
NONCE = bytes(range(16))
_TEXTS = ("text", "delta", "content", "arguments", "partial_json", "reasoning", "thinking", "finish_reason", "name")
CREATED = 1_700_000_000.25


class Part(msgspec.Struct):
    """A message of an answer: bytes, or tokens of an answer that is sent as a whole."""

    body: bytes
    shown: Shown | None


class CutApp(ServedApp):
    """`scripts`: text of the answer to each prompt by a key in it, the last one if there are several."""

    def __init__(
        self,
        folder: Path,
        scripts: dict[str, str],
        form: AnswerForm,
        seed: int = 0,
        *,
        spec: EngineSpec | None = None,
        template: ChatTemplate = TEMPLATE,
        media: MediaInput | None = None,
        journal: HttpJournal | None = None,
    ) -> None:
        spec = spec or in_folder(new_spec(config=EngineConfig(seed=seed)), folder)
        super().__init__(spec, template, media, journal)
        self.frontend.forms._known(Choice(form=form, origin="named"))
        self.scripts = scripts
        self.num_cached = 16
        self.tokens_per_turn = deque([1])  # taken in turn
        self.num_given = 0  # tokens that the core has made
        self._open: dict[int, tuple[EngineCoreRequest, list[int], int]] = {}  # request, tokens, number of those sent
        self._is_waiting = False

    def turn(self) -> None:
        for message in self.messages_to_core():
            if isinstance(message, EngineCoreRequest):
                self._begin(message)
            elif isinstance(message, AbortRequests):
                for key in message.keys:
                    self._open.pop(key, None)
        if self._open and not self._is_waiting:
            self._is_waiting = True
            self.loop.call_later(0, self._step)

    def _begin(self, request: EngineCoreRequest) -> None:
        prompt = TOKENIZER.decode(decode_ids(request.prompt_token_ids).tolist())
        text = self.scripts[max(self.scripts, key=prompt.rfind)]  # the text about tools stands before
        keys = [child.key for child in request.children]
        sources = _sources_of(request)
        for child in request.children:
            token_ids = [*ids(f"{text} {child.seed % 1000}{sources}" if text else ""), EOS]
            known = decode_ids(child.output_token_ids).tolist()
            assert known == token_ids[: len(known)], "the client has the tokens of this answer"
            self._open[child.key] = (request, token_ids, len(known))
        started = [Started(key=key, num_cached_tokens=self.num_cached) for key in keys]
        self._say(accepted=keys[:1], started=started, prompt_logprobs=_prompt_logprobs(request))

    def _step(self) -> None:
        """Give each open answer its next tokens."""
        self._is_waiting = False
        self.tokens_per_turn.rotate(-1)
        for key, (request, token_ids, start) in list(self._open.items()):
            end = min(start + self.tokens_per_turn[0], len(token_ids), request.max_tokens)
            new = token_ids[start:end]
            self.num_given += len(new)
            ended: list[Finished] = []
            if end == len(token_ids) or end == request.max_tokens:
                ended = [Finished(key=key, reason="stop" if new[-1] == EOS else "length")]
                del self._open[key]
            else:
                self._open[key] = (request, token_ids, end)
            columns = {"keys": [key], "starts": [start], "counts": [len(new)], "token_ids": new}
            num_top = request.params.num_logprobs
            logprobs = None if num_top is None else _logprobs(key, start, new, num_top)
            self._say(finished=ended, logprobs=logprobs, **{name: encode_ids(each) for name, each in columns.items()})
        if self._open:
            self._is_waiting = True
            self.loop.call_later(0, self._step)

    async def parts(self, path: str, body: bytes, continuation: Continuation) -> list[Part]:
        return await parts_of(self, path, body, continuation)

    def _say(self, **columns: Any) -> None:
        self.frontend.on_core_message(EngineCoreOutputs(**columns))
        self.frontend.tick(self.loop.time())


async def parts_of(
    served: ServedApp, path: str, body: bytes, continuation: Continuation, content_type: bytes = b"application/json"
) -> list[Part]:
    """Return all messages of an answer that have a body or tokens. The status must be 200."""
    found: list[Part] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
            return
        found.append(Part(message.get("body", b""), message.get(SHOWN)))
        assert not message.get("body") or message["type"] != TOKENS

    chunks = deque([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if not chunks:
            await asyncio.Event().wait()
        return chunks.popleft()

    headers = [(b"content-type", content_type), (b"authorization", b"Bearer sk-loom")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    with working_on(continuation):
        async with asyncio.timeout(DEADLINE_S):
            await served.app(scope | {"headers": headers, "client": ("c", 1)}, receive, send)
    return found


def continuation_of(parts: Sequence[Part]) -> Continuation:
    """Return the continuation of a request after these parts of its answer."""
    continuation = Continuation(nonce=NONCE, created=CREATED, is_kept=True)
    for part in parts:
        continuation.is_resumed |= bool(part.body)
        if part.shown is None:
            continue
        for choice, token_ids in part.shown.tokens:
            continuation.answers.setdefault(choice, Answer([])).token_ids.extend(decode_ids(token_ids))
        for choice, reason in part.shown.ended:
            continuation.answers.setdefault(choice, Answer([])).finish_reason = reason
        for choice, logprobs in part.shown.logprobs:
            continuation.answers.setdefault(choice, Answer([])).logprobs.append(logprobs)
        continuation.sources.update(part.shown.sources)
        continuation.num_events, continuation.num_cached = part.shown.num_events, part.shown.num_cached
        continuation.seed = part.shown.seed
    return continuation


def texts_of(events: bytes) -> dict[str, str]:
    """Return the texts in events by their places, joined: they do not depend on how the text is cut into events. Events
    with sequence numbers must have them without a gap."""
    texts: dict[str, str] = {}
    numbers: list[int] = []
    for line in events.split(b"\n"):
        if line.startswith(b"data: {"):
            found = msgspec.json.decode(line.removeprefix(b"data: "))
            numbers += [found["sequence_number"]] if "sequence_number" in found else []
            _join(found, found.get("type", ""), texts)
    assert numbers == list(range(len(numbers)))
    return texts


def _join(value: Any, place: str, texts: dict[str, str]) -> None:
    """Add the texts below `place`."""
    if isinstance(value, str) and place.rpartition("/")[2] in _TEXTS:
        texts[place] = texts.get(place, "") + value
    elif isinstance(value, list):
        for each in value:
            _join(each, place, texts)
    elif isinstance(value, dict):
        index = value.get("index", value.get("output_index", ""))
        for name, each in value.items():
            _join(each, f"{place}{index}/{name}", texts)


def _sources_of(request: EngineCoreRequest) -> str:
    """Return words that depend on the adapter and the media of a request; none without them."""
    digests = [] if request.adapter is None else [request.adapter.digest]
    digests += [span.digest for span in request.media]
    return "".join(f" {each.hex()[:6]}" for each in digests)


def some_turns(seed: int) -> deque[int]:
    """Return numbers of tokens of some turns."""
    return deque(random.Random(seed).choices((1, 1, 2, 5), k=7))


def _logprobs(key: int, start: int, token_ids: Sequence[int], num_top: int = 0) -> KeyLogprobs:
    """Logprobs with alternatives: that of the i-th token is -i / 4, and its alternatives are the ids behind its own."""
    count, width = len(token_ids), num_top + 1
    values = array("f", [-(i + place) / 4 for i in range(start, start + count) for place in range(width)])
    return KeyLogprobs(
        keys=encode_ids([key] * count),
        positions=encode_ids(range(start, start + count)),
        widths=encode_ids([width] * count),
        ranks=encode_ids(range(start + 1, start + 1 + count)),
        token_ids=encode_ids([token_id + place for token_id in token_ids for place in range(width)]),
        logprobs=values.tobytes(),
    )


def _prompt_logprobs(request: EngineCoreRequest) -> KeyLogprobs | None:
    if request.params.prompt_logprobs is None:
        return None
    return _logprobs(request.children[0].key, 1, decode_ids(request.prompt_token_ids).tolist()[1:])
