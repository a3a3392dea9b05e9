"""A streamed transcript that stops after any part goes on with the rest; with logprobs it ends with an error."""

from __future__ import annotations

import asyncio

import httpx2

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


@with_served(family="whisper")
async def test_a_transcript_that_is_cut_goes_on_with_its_rest(served: Served) -> None:
    served.held = {"Big", "world."}
    reading = asyncio.ensure_future(transcribed(served, []))
    await served.until(lambda: sorted(served.open_texts) == ["Big", "world."])
    served.release("world.")
    await served.until(lambda: served.open_texts == ["Big"])
    served.release("Big")
    parts = await reading
    whole = b"".join(part.body for part in parts)
    assert len(parts) > 1 and b"Hello. Big world." in whole
    for num_sent in range(1, len(parts)):
        rest = await transcribed(served, parts[:num_sent])
        assert b"".join(part.body for part in [*parts[:num_sent], *rest]) == whole
    await served.until_no_pins()


@with_served(family="whisper")
async def test_a_transcript_with_logprobs_that_is_cut_ends_with_an_error(served: Served) -> None:
    fields = {"include[]": "logprobs", "response_format": "json"}
    first, *_ = await transcribed(served, [], **fields)
    (error,) = await transcribed(served, [first], **fields)
    assert b"cannot go on" in error.body and error.body.endswith(b"data: [DONE]\n\n")
