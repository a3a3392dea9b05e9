"""The official client gets every format, streams and errors of transcriptions and translations.

It calls the app without sockets; the core of the test answers each piece of a clip with that piece's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent

from tokenloom.frontend.server.api.speech.transcription import MAX_OPEN_PIECES
from tokenloom.tests.frontend.bench import ids
from tokenloom.tests.frontend.forms.speech.served import EOS, Served, TimedLoop, with_served
from tokenloom.tests.frontend.server.adapters.samples import write_adapter
from tokenloom.tests.frontend.server.http.served_app import KEY
from tokenloom.tests.frontend.server.requests.fake_clips import BAD, PIECE_TOKENS, clip

TEXTS = ("Hello there.", "General Kenobi.")
UPLOAD = ("speech.wav", clip(*TEXTS, seconds=12.5))
deprecated = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # translations, by OpenAI's client


@deprecated
@with_served()
async def test_every_format_has_the_joined_text(served: Served) -> None:
    create = served.client.audio.transcriptions.create
    transcription = await create(file=UPLOAD, model="sample")
    assert transcription.text == "Hello there. General Kenobi."
    text = await create(file=UPLOAD, model="sample", response_format="text")
    assert text == "Hello there. General Kenobi.\n"
    srt = await create(file=UPLOAD, model="sample", response_format="srt")
    assert srt == (
        "1\n00:00:00,000 --> 00:00:12,500\nHello there.\n\n2\n00:00:12,500 --> 00:00:25,000\nGeneral Kenobi.\n\n"
    )
    vtt = await create(file=UPLOAD, model="sample", response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:12.500\nHello there.\n\n00:00:12.500 -->")
    translation = await served.client.audio.translations.create(file=UPLOAD, model="sample")
    assert translation.text == "Hello there. General Kenobi."
    assert sum(served.reader.reads.values()) == 1 and served.reader.piece_s == 20.0  # the model's only window


@deprecated
@with_served()
async def test_verbose_json_has_segments_with_times_tokens_and_logprobs(served: Served) -> None:
    verbose = await served.client.audio.transcriptions.create(
        file=UPLOAD,
        model="sample",
        response_format="verbose_json",
        language="EN",
        temperature=0.5,
        timestamp_granularities=["segment"],
    )
    assert (verbose.language, verbose.duration, verbose.text) == ("english", 25.0, "Hello there. General Kenobi.")
    assert verbose.usage is not None and verbose.usage.seconds == 25.0 and verbose.words is None
    assert verbose.segments is not None
    found = [(each.id, each.seek, each.start, each.end, each.text) for each in verbose.segments]
    assert found == [(0, 0, 0.0, 12.5, TEXTS[0]), (1, 1250, 12.5, 25.0, TEXTS[1])]
    for segment, text in zip(verbose.segments, TEXTS, strict=True):
        assert segment.tokens == ids(text) and segment.temperature == 0.5 and segment.no_speech_prob == 0.0
        assert segment.avg_logprob == pytest.approx(sum(-i / 4 for i in range(len(ids(text)))) / len(ids(text)))
    translated = await served.client.audio.translations.create(
        file=UPLOAD, model="sample", response_format="verbose_json", extra_body={"to_language": "fr"}
    )
    assert translated.language == "french"
    assert all("into French" in served.prompt_of(request) for request in served.requests[2:])
    unknown = await served.post(clip("x"), response_format="verbose_json")
    assert unknown.json()["language"] == "unknown" and unknown.json()["task"] == "transcribe"


@with_served()
async def test_usage_counts_tokens_of_text_and_audio(served: Served) -> None:
    usage = (await served.client.audio.transcriptions.create(file=UPLOAD, model="sample")).usage
    assert usage is not None and usage.type == "tokens" and usage.input_token_details is not None
    prompts = [len(request.prompt_token_ids) // 4 for request in served.requests]
    assert usage.input_tokens == sum(prompts) and usage.input_token_details.audio_tokens == 2 * PIECE_TOKENS
    assert usage.input_token_details.text_tokens == sum(prompts) - 2 * PIECE_TOKENS
    assert usage.output_tokens == sum(len(ids(text)) + 1 for text in TEXTS)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    metrics = served.frontend.metrics.render()
    assert 'tokenloom_transcribed_audio_seconds_total{engine="0",model_name="sample"} 25' in metrics


@with_served()
async def test_a_stream_gives_the_text_in_the_order_of_the_pieces_and_then_all_of_it(served: Served) -> None:
    served.held = {"one", "three"}
    upload = ("speech.wav", clip("one", "two", "three"))
    create = served.client.audio.transcriptions.create(file=upload, model="sample", stream=True)
    creating = served.loop.create_task(create)
    await served.until(lambda: served.open_texts == ["one", "three"])
    assert not creating.done(), "the second piece waits for the first"
    served.release("one")
    events = aiter(await creating)
    first = await anext(events)
    assert isinstance(first, TranscriptionTextDeltaEvent) and "one two".startswith(first.delta)
    served.release("three")
    others = [event async for event in events]
    *deltas, done = [first, *others]
    assert all(isinstance(each, TranscriptionTextDeltaEvent) for each in deltas) and len(deltas) >= 2
    assert isinstance(done, TranscriptionTextDoneEvent) and done.text == "one two three"
    assert "".join(each.delta for each in deltas) == done.text
    assert done.usage is not None and done.usage.input_tokens == done.usage.total_tokens - done.usage.output_tokens


@with_served()
async def test_tokens_of_one_piece_are_streamed_as_they_come(served: Served) -> None:
    served.held = {"one two"}
    upload = ("speech.wav", clip("one two"))
    create = served.client.audio.transcriptions.create(file=upload, model="sample", stream=True, include=["logprobs"])
    creating = served.loop.create_task(create)
    await served.until(lambda: bool(served.requests))
    key, tokens = served.requests[0].children[0].key, ids("one two")
    served.say_tokens(key, tokens[:1], True)
    events = aiter(await creating)
    deltas = [await anext(events)]
    served.say_tokens(key, tokens[1:], True, start=1)
    deltas.append(await anext(events))
    assert all(isinstance(each, TranscriptionTextDeltaEvent) for each in deltas)
    served.end(key)
    (done,) = [event async for event in events]
    assert isinstance(done, TranscriptionTextDoneEvent) and "".join(each.delta for each in deltas) == "one two"
    logprobs = [each for delta in deltas for each in delta.logprobs or ()]
    assert [each.logprob for each in logprobs] == [-place / 4 for place in range(len(tokens))]
    assert done.logprobs is not None and [each.logprob for each in done.logprobs] == [e.logprob for e in logprobs]


@with_served()
async def test_logprobs_of_a_transcript_leave_out_the_end_token(served: Served) -> None:
    found = await served.client.audio.transcriptions.create(
        file=("a.wav", clip("one two")), model="sample", include=["logprobs"]
    )
    assert found.logprobs is not None and EOS not in ids("one two")
    assert "".join(each.token or "" for each in found.logprobs) == "one two"
    assert [each.bytes for each in found.logprobs] == [[*(each.token or "").encode()] for each in found.logprobs]


@with_served(family="qwen3_asr")
async def test_qwen3_asr_names_the_language_itself_or_is_told(served: Served) -> None:
    heard = clip("language Dutch<asr_text>Goedemorgen.", "language Dutch<asr_text>Hallo.")
    found = (await served.post(heard, response_format="verbose_json", prompt="Ochtend")).json()
    assert (found["language"], found["text"]) == ("dutch", "Goedemorgen. Hallo.")
    assert [each["text"] for each in found["segments"]] == ["Goedemorgen.", "Hallo."]
    assert found["segments"][0]["tokens"] == ids("language Dutch<asr_text>Goedemorgen.")[-len(ids("Goedemorgen.")) :]
    assert [served.prompt_of(each) for each in served.requests] == ["[Ochtend][#\n]"] * 2
    streamed = await served.post(heard, stream="true")
    assert '"text":"Goedemorgen. Hallo."' in streamed.text and "asr_text" not in streamed.text
    told = (await served.post(clip("Hallo."), response_format="verbose_json", language="nl")).json()
    assert (told["language"], told["text"]) == ("dutch", "Hallo.")
    assert served.prompt_of(served.requests[-1]).endswith("]language Dutch<asr_text>")
    assert served.reader.piece_s == 30.0
    status, message, param = await served.error(language="is")
    assert (status, param) == (400, "language") and "is (Icelandic), this model transcribes ar (Arabic)" in message
    status, message, param = await served.error(task="translations")
    assert (status, param) == (400, "file") and "only transcribes" in message


@with_served()
async def test_at_most_so_many_pieces_are_open_and_the_next_follow_in_order(served: Served) -> None:
    texts = [f"piece {number}" for number in range(2 * MAX_OPEN_PIECES + 3)]
    served.held = set(texts)
    task = served.loop.create_task(served.post(clip(*texts)))
    await served.until(lambda: len(served.requests) == MAX_OPEN_PIECES)
    for number, text in enumerate(texts):
        assert served.open_texts == texts[number : number + MAX_OPEN_PIECES]
        served.release(text)
        expected = min(number + 1 + MAX_OPEN_PIECES, len(texts))
        await served.until(lambda count=expected: len(served.requests) == count)  # type: ignore[misc]
        await served.until(lambda text=text: text not in served.open_texts)  # type: ignore[misc]
    assert (await task).json()["text"] == " ".join(texts)


@with_served()
async def test_sampling_fields_reach_each_piece_and_the_temperature_is_zero_if_not_given(served: Served) -> None:
    fields = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": 11, "priority": 3}
    fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5}
    assert (await served.post(clip("a", "b"), max_completion_tokens=5, **fields)).status_code == 200
    for request in served.requests:
        params = request.params
        assert {name: getattr(params, name) for name in fields} == fields and request.max_tokens == 5
    assert (await served.post(clip("a"))).status_code == 200
    params = served.requests[-1].params
    assert (params.temperature, params.seed, params.logprobs) == (0.0, None, None)
    assert served.requests[-1].max_tokens == 512 - len(served.requests[-1].prompt_token_ids) // 4


@pytest.mark.parametrize("is_stream", [False, True])
@with_served()
async def test_an_error_of_one_piece_is_the_error_of_all_and_aborts_the_others(served: Served, is_stream: bool) -> None:
    served.held, served.failing = {"one", "two", "three"}, {"two": "the second piece failed"}
    creating = served.loop.create_task(
        served.client.audio.transcriptions.create(
            file=("a.wav", clip("one", "two", "three")), model="sample", stream=is_stream
        )
    )
    await served.until(lambda: len(served.open_texts) == 3)
    served.release("two")
    with pytest.raises(openai.InternalServerError, match="the second piece failed"):
        await creating
    await served.until(lambda: len(served.aborted) == 2)
    assert sorted(served.aborted) == ["one", "three"] and not served.open_texts
    await served.until_no_pins()


@with_served()
async def test_an_error_amid_a_stream_is_an_event(served: Served) -> None:
    served.held, served.failing = {"two"}, {"two": "the second piece failed"}
    stream = await served.client.audio.transcriptions.create(
        file=("a.wav", clip("one", "two")), model="sample", stream=True
    )
    events = aiter(stream)
    assert (await anext(events)).type == "transcript.text.delta"
    served.release("two")
    with pytest.raises(openai.APIError, match="the second piece failed"):
        await anext(events)


@pytest.mark.parametrize("is_stream", [False, True])
@with_served()
async def test_a_client_that_leaves_aborts_all_pieces_and_releases_them(served: Served, is_stream: bool) -> None:
    served.held = {"one", "two"}
    task = served.loop.create_task(served.post(clip("one", "two"), stream="true" if is_stream else None))
    await served.until(lambda: len(served.open_texts) == 2)
    task.cancel()
    await served.until(lambda: len(served.aborted) == 2)
    await served.until_no_pins()


@with_served()
async def test_a_client_that_leaves_while_its_clip_is_read_submits_nothing(served: Served) -> None:
    served.reader.is_held = True
    task = served.loop.create_task(served.post(clip("one")))
    while not served.reader.reads:
        await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    served.reader.is_held = False
    await served.until_no_pins()
    assert not served.requests


@pytest.mark.parametrize("reason", ["abort", "timeout"])
@with_served()
async def test_a_piece_that_ends_early_fails_the_whole_transcript(served: Served, reason: str) -> None:
    served.held = {"two"}
    task = served.loop.create_task(served.error(clip("one", "two")))
    await served.until(lambda: served.open_texts == ["two"])
    served.end(served.requests[-1].children[0].key, reason)
    assert await task == (
        400,
        f"file: piece 2 of 2 ended with {reason} amid its transcript: send the file again",
        "file",
    )


@with_served(enable_lora=True, api_key=[KEY])
async def test_a_lora_adapter_is_a_model_and_all_pieces_have_the_same(served: Served, tmp_path: Path) -> None:
    async def load(name: str, seed: int) -> None:
        write_adapter(tmp_path / name, seed=seed)
        order = {"lora_name": "accent", "lora_path": str(tmp_path / name), "load_inplace": True}
        assert (await served.http.post("/v1/load_lora_adapter", json=order)).status_code == 200

    await load("one", 1)
    texts = [f"piece {number}" for number in range(MAX_OPEN_PIECES + 2)]
    served.held = set(texts)
    task = served.loop.create_task(served.post(clip(*texts), model="accent"))
    await served.until(lambda: len(served.requests) == MAX_OPEN_PIECES)
    await load("two", 2)
    served.release(*texts)
    assert (await task).json()["text"] == " ".join(texts)
    (digest,) = {request.adapter and request.adapter.digest for request in served.requests}
    await served.post(clip("other"), model="accent")
    adapter = served.requests[-1].adapter
    assert adapter is not None and digest is not None and adapter.digest != digest
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        await served.client.audio.transcriptions.create(file=UPLOAD, model="other")


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"language": "xx"}, "language", "language is 'xx', which is no language of ISO 639-1"),
    (
        {"response_format": "srt", "stream": "true"},
        "response_format",
        "response_format is srt, which is not streamed",
    ),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "needs response_format verbose_json"),
    (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        "timestamp_granularities",
        "this model gives no times of words",
    ),
    ({"include[]": "logprobs", "response_format": "text"}, "include", "needs response_format json"),
    ({"temperature": "-1"}, "temperature", "temperature must be"),
    ({"max_completion_tokens": "0"}, "max_completion_tokens", "max_completion_tokens must be"),
    ({"n": "2"}, "n", "n is not served by this engine"),
    ({"languages[]": ["en", "fr"]}, "languages", "languages is not served"),
    ({"keywords[]": ["Kenobi"]}, "keywords", "keywords is not served"),
    ({"known_speaker_names[]": ["Obi"]}, "known_speaker_names", "known_speaker_names is not served"),
    ({"known_speaker_references[]": ["data:,"]}, "known_speaker_references", "known_speaker_references is not"),
    ({"chunking_strategy": "server_vad"}, "chunking_strategy", "chunking_strategy is not served"),
    ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens", "truncate_prompt_tokens is not served"),
    ({"prompt": "x" * (16 * 1024 + 1)}, "prompt", "prompt has 16385 characters, at most 16384"),
    ({"prompt": "long words " * 200}, "file", "maximum context length"),
]


@with_served()
async def test_bad_fields_are_refused_by_name(served: Served) -> None:
    for fields, param, complaint in BAD_FIELDS:
        status, message, found = await served.error(**fields)
        assert (status, found) == (400, param) and complaint in message, message
    assert not served.requests


@with_served(max_media_bytes=300)
async def test_a_clip_that_cannot_be_read_is_an_error_of_the_file(served: Served) -> None:
    status, message, param = await served.error(BAD)
    assert (status, param) == (400, "file") and message.endswith("the bytes are no audio of a known format")
    status, message, param = await served.error(b"x" * 301)
    assert (status, param) == (400, "file") and "has 301 bytes, at most 300 are read" in message


@with_served(max_media_bytes=2 << 20)
async def test_a_large_upload_is_read_by_an_intake_process(served: Served) -> None:
    large = clip(*TEXTS) + b" " * (1 << 20)
    found = await served.client.audio.transcriptions.create(file=("a.wav", large), model="sample")
    assert found.text == " ".join(TEXTS) and [*served.reader.reads] == [large]
    status, message, param = await served.error(large, language="xx")
    assert (status, param) == (400, "language")
    status, message, param = await served.error(large, temperature="warm")
    assert (status, param) == (400, "temperature") and "Expected `float" in message
    too_large = large + b" " * (2 << 20)
    status, message, param = await served.error(too_large)
    assert status == 400 and f"has {len(too_large)} bytes, at most {2 << 20} are read" in message


@with_served(TimedLoop, max_media_bytes=25_000_000)
async def test_an_upload_of_25_mb_holds_the_loop_for_less_than_5_ms(served: Served) -> None:
    assert isinstance(served.loop, TimedLoop)
    large = bytes(25_000_000)  # no JSON: the reader of the test, which is a thread, reads nothing of it
    request = served.http.build_request("POST", "/v1/audio/transcriptions", files={"file": ("a.wav", large)})
    body = await request.aread()
    warm = await served.error(bytes(1 << 20))
    headers = {"content-type": request.headers["content-type"]}
    gc.collect()
    gc.disable()  # it looks at the objects of all tests
    await asyncio.sleep(0)  # a callback of its own
    try:
        served.loop.longest_s = 0.0
        response = await served.http.post("/v1/audio/transcriptions", content=body, headers=headers)
    finally:
        gc.enable()
    assert response.status_code == warm[0] == 400 and "no audio" in response.text
    assert served.loop.longest_s < 0.005


NO_FORMS = [
    ("application/json", b'{"file": "a"}', 415, "the body comes as application/json: send a form"),
    ("", b"RIFF", 415, "the body comes as no type: send a form"),
    ("multipart/form-data", b"--x--", 400, "names no boundary"),
    ("multipart/form-data; boundary=x", b"", 400, "the body is empty: send a form"),
    ("multipart/form-data; boundary=x", b"--y\r\n", 400, "does not contain its boundary"),
    ("multipart/form-data; boundary=x", b"--x\r\nContent-Disp", 400, "ends in the midst of part 1"),
    ("multipart/form-data; boundary=x", b"--x--\r\n", 400, "missing required field `file`"),
]


@with_served()
async def test_bodies_that_are_no_forms_are_refused(served: Served) -> None:
    for content_type, body, status, complaint in NO_FORMS:
        headers = {"content-type": content_type} if content_type else {}
        response = await served.http.post("/v1/audio/transcriptions", content=body, headers=headers)
        assert response.status_code == status and complaint in response.json()["error"]["message"], response.text


@with_served()
async def test_unknown_fields_are_named_in_a_warning(served: Served) -> None:
    response = await served.post(clip("a"), langauge="en")
    assert response.status_code == 200
    assert response.headers["warning"].endswith('unknown fields were ignored: langauge (did you mean language?)"')


@with_served(family="")
async def test_a_model_that_hears_no_audio_refuses_forms_by_its_name(served: Served) -> None:
    for task in ("transcriptions", "translations"):
        status, message, param = await served.error(b"x" * (1 << 20), task)
        assert (status, param) == (400, "model")
        assert message == "the model 'sample' does not hear audio: choose one that does"
    assert not any("audio" in path for path in (await served.http.get("/openapi.json")).json()["paths"])


@with_served()
async def test_the_openapi_document_has_the_forms(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()
    for path, name in (("transcriptions", "TranscriptionRequest"), ("translations", "TranslationRequest")):
        operation = document["paths"][f"/v1/audio/{path}"]["post"]
        content = operation["requestBody"]["content"]
        assert content["multipart/form-data"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        fields = document["components"]["schemas"][name]
        assert fields["required"] == ["file"]
        file = fields["properties"]["file"]
        assert (file["type"], file["format"]) == ("string", "binary")
        assert all(each["description"].endswith(".") for each in fields["properties"].values())
        assert list(fields["properties"])[:2] == ["file", "temperature"]
        assert fields["properties"]["temperature"]["default"] == 0
        answers = operation["responses"]["200"]["content"]
        assert {"application/json", "text/plain", "text/vtt", "text/event-stream"} == answers.keys()
