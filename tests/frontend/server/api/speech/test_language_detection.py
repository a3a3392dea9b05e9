"""A model that names languages by tokens is asked for that of the first piece, before all pieces are transcribed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tokenloom.tests.frontend.forms.speech.served import LANGUAGE_IDS, Served, with_served
from tokenloom.tests.frontend.server.requests.fake_clips import clip


@with_served(family="whisper")
async def test_all_pieces_have_the_language_of_the_first(served: Served) -> None:
    found = (await served.post(clip("Hallo.", "Welt."), response_format="verbose_json", priority="3")).json()
    assert (found["language"], found["text"]) == ("german", "Hallo. Welt.")
    question, *others = served.requests
    assert served.text_of(question) == "Hallo." and question.params.allowed_token_ids == [*LANGUAGE_IDS.values()]
    assert (question.max_tokens, question.params.temperature, question.params.priority) == (1, 0.0, 3)
    assert served.prompt_of(question).endswith("<|startoftranscript|>")
    assert all(served.prompt_of(each).endswith("<|de|><|transcribe|><|notimestamps|>") for each in others)
    assert [served.text_of(each) for each in others] == ["Hallo.", "Welt."]
    assert all(each.params.allowed_token_ids is None for each in others)


@pytest.mark.parametrize("is_stream", [False, True])
@with_served(family="whisper")
async def test_a_language_that_the_caller_names_is_not_asked_for(served: Served, is_stream: bool) -> None:
    found = await served.post(clip("Hello."), language="en", stream="true" if is_stream else None)
    assert "Hello." in found.text
    (request,) = served.requests
    assert served.prompt_of(request).endswith("<|en|><|transcribe|><|notimestamps|>")


@with_served(family="whisper")
async def test_a_question_that_ends_early_is_an_error_of_the_file(served: Served) -> None:
    served.held = {"one"}
    task = served.loop.create_task(served.error(clip("one", "two")))
    await served.until(lambda: served.open_texts == ["one"])
    served.end(served.requests[-1].children[0].key, "timeout")
    status, message, param = await task
    assert (status, param) == (400, "file") and "the detection of its language ended with timeout" in message
    served.failing = {"other": "the step failed"}
    status, message, _ = await served.error(clip("other"))
    assert status == 500 and "the step failed" in message
    assert len(served.requests) == 2
    await served.until_no_pins()


@with_served(family="whisper")
async def test_a_client_that_leaves_amid_the_question_aborts_it(served: Served) -> None:
    served.held = {"one"}
    task = served.loop.create_task(served.post(clip("one", "two")))
    await served.until(lambda: served.open_texts == ["one"])
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await served.until(lambda: served.aborted == ["one"])
    await served.until_no_pins()
    assert len(served.requests) == 1
