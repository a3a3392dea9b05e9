"""A streamed transcript that stops after any part goes on with the rest, with logprobs or without."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from tokenloom.tests.frontend.forms.speech.served import Served, with_served
from tokenloom.tests.frontend.server.api.cut_answers import Part, continuation_of, parts_of
from tokenloom.tests.frontend.server.requests.fake_clips import clip

PATH = "/v1/audio/transcriptions"


async def transcribed(served: Served, sent: list[Part], **fields: object) -> list[Part]:
    """Return the parts behind those that were sent."""
    data = {"stream": "true", "language": "en", **fields}
    files = {"file": ("speech.wav", clip("Hello.", "Big", "world."))}
    request = httpx2.Request("POST", f"http://app{PATH}", data=data, files=files)
    request.read()
    return await parts_of(
        served, PATH, request.content, continuation_of(sent), request.headers["content-type"].encode()
    )


def content_of(body: bytes) -> tuple[str, list[object], list[object]]:
    """Return the joined text and log probabilities of a stream's deltas, and its other events: texts of segments that
    end together may come in one delta or in two."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line and line != "data: [DONE]"]
    events = [json.loads(line) for line in lines]
    deltas = [event for event in events if event["type"] == "transcript.text.delta"]
    logprobs = [each for event in deltas for each in event.get("logprobs", ())]
    return "".join(event["delta"] for event in deltas), logprobs, [event for event in events if event not in deltas]


@pytest.mark.parametrize("fields", [{}, {"include[]": "logprobs", "response_format": "json"}])
@with_served(family="whisper")
async def test_a_transcript_that_is_cut_goes_on_with_its_rest(served: Served, fields: dict[str, str]) -> None:
    served.held = {"Big", "world."}
    reading = asyncio.ensure_future(transcribed(served, [], **fields))
    await served.until(lambda: sorted(served.open_texts) == ["Big", "world."])
    served.release("world.")
    await served.until(lambda: served.open_texts == ["Big"])
    served.release("Big")
    parts = await reading
    whole = b"".join(part.body for part in parts)
    assert len(parts) > 1 and b"Hello. Big world." in whole and whole.endswith(b"data: [DONE]\n\n")
    assert (b"logprob" in whole) == bool(fields)
    for num_sent in range(1, len(parts)):
        rest = await transcribed(served, parts[:num_sent], **fields)
        joined = b"".join(part.body for part in [*parts[:num_sent], *rest])
        assert content_of(joined) == content_of(whole) and joined.count(b"[DONE]") == 1
    await served.until_no_pins()
