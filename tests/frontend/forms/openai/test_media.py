"""Images and audio in the forms of the three APIs, vLLM and Hugging Face are the same media in the same places."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.anthropic.request_body import chat_request as chat_of_messages
from tokenloom.frontend.forms.media.held_medium import HeldMedium
from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.openai.messages import ChatInput, chat_input
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest, chat_request
from tokenloom.frontend.forms.openai.schema import ChatRequest, TokenizeRequest
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import MediaPart, Medium, TextPart
from tokenloom.ipc.messages.media import MediaKind

DATA = b"bytes of a medium"
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:audio/wav;base64,{BASE64}"
TEXT, WRITTEN = {"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
AUDIO_FORMS = [
    INPUT_AUDIO,
    {"type": "input_audio", "input_audio": {"data": URL, "format": "mp3"}},
    {"type": "audio_url", "audio_url": {"url": URL}},
    {"type": "audio_url", "audio_url": URL},
    {"type": "audio", "audio": URL},
    {"type": "audio", "audio": {"data": BASE64, "format": "wav"}},
    {"type": "audio", "audio": {"url": URL}},
    {"type": "audio", "audio_url": URL},
    {"type": "audio", "url": URL},
    {"type": "audio", "base64": BASE64},
]
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "u"}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": BASE64}}


def limits_of(kind: MediaKind | None, max_count: int | None = None) -> MediaLimits:
    return MediaLimits(model="m", kind=kind, off_by={}, max_count=max_count, max_bytes=1000)


SEEING, HEARING = limits_of("image"), limits_of("audio")


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def of_chat(limits: MediaLimits, *parts: Any, kind: Any = ChatRequest) -> ChatInput:
    return chat_input(msgspec.convert({"messages": [said(*parts)]}, kind), limits)


def of_response(limits: MediaLimits, item: Any) -> ChatInput:
    return chat_input(chat_request(msgspec.convert({"input": [item]}, ResponsesRequest)), limits)


def of_messages(limits: MediaLimits, **body: Any) -> ChatInput:
    return chat_input(chat_of_messages(msgspec.convert({"max_tokens": 1, **body}, MessagesRequest)), limits)


def check(found: ChatInput, *roles: str) -> None:
    """Assert that a chat has one medium in the turn of each role, after a text."""
    assert [turn.role for turn in found.turns] == [*roles]
    assert all(turn.parts[-2:] == [TextPart("a"), MediaPart(i)] for i, turn in enumerate(found.turns))
    assert all(isinstance(medium, HeldMedium) and medium.data == DATA for medium in found.media)
    assert len(found.media) == len(roles)


@pytest.mark.parametrize("part", AUDIO_FORMS)
def test_every_form_of_audio_gives_the_bytes_of_the_file(part: Any) -> None:
    for kind in (ChatRequest, TokenizeRequest):
        found = of_chat(HEARING, TEXT, part, kind=kind)
        check(found, "user")
        assert found.media[0].kind == "audio"


def test_the_three_apis_give_the_same_media() -> None:
    check(of_chat(SEEING, TEXT, IMAGE), "user")
    check(of_response(SEEING, said(WRITTEN, INPUT_IMAGE)), "user")
    check(of_response(HEARING, said(WRITTEN, INPUT_AUDIO)), "user")
    output = {"type": "function_call_output", "call_id": "c", "output": [WRITTEN, INPUT_IMAGE]}
    check(of_response(SEEING, output), "tool")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, SOURCE]}
    turns = [said(result), said(TEXT, SOURCE)]
    check(of_messages(SEEING, system=[TEXT, SOURCE], messages=turns), "system", "tool", "user")


def test_uuid_and_detail_are_kept_and_urls_are_not_fetched_here() -> None:
    url = "https://a.example/b"
    first, *others = of_chat(
        SEEING, IMAGE, {"type": "image_url", "image_url": url}, {"type": "image_url", "uuid": "v"}
    ).media
    assert (first.uuid, first.detail, others) == ("u", "low", [Medium(url=url), Medium(uuid="v")])
    source = {"type": "image", "source": {"type": "url", "url": url}}
    assert of_messages(SEEING, messages=[said(source)]).media == [Medium(url=url)]
    clips = ({"type": "audio_url", "audio_url": {"url": url}}, {"type": "audio_url", "uuid": "v"})
    first, *others = of_chat(HEARING, INPUT_AUDIO | {"uuid": "u"}, *clips).media
    assert (first.uuid, others) == ("u", [Medium(kind="audio", url=url), Medium(kind="audio", uuid="v")])


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


@pytest.mark.parametrize(
    ("limits", "part", "complaint"),
    [
        (HEARING, {"type": "audio", "audio": "/etc/passwd"}, ": the audio clip '/etc/passwd' is no data:"),
        (HEARING, {"type": "input_audio", "input_audio": {"data": "?"}}, ": a data: URL is not base64"),
        (HEARING, {"type": "input_audio", "input_audio": {}}, " is a part of type 'input_audio' without an audio clip"),
        (HEARING, {"type": "audio"}, " is a part of type 'audio' without an audio clip: give its URL or its data"),
        (HEARING, {"type": "audio", "path": "/etc/passwd"}, " is a part of type 'audio' without"),
        (HEARING, {"type": "input_audio", "file_id": "f"}, " has a file_id: this engine stores no files, give the aud"),
        (HEARING, image(URL), ": the model 'm' does not see images: leave them out"),
        (HEARING, SOURCE, ": the model 'm' does not see images: leave them out"),
        (HEARING, {"type": "video_url", "url": URL}, " is a part of type 'video_url', which is not served"),
        (SEEING, image("/etc/passwd"), ": the image '/etc/passwd' is no data:"),
        (SEEING, image("data:image/png;base64,?"), ": a data: URL is not base64"),
        (SEEING, image(URL, detail="big"), ": the detail of an image is 'big'"),
        (SEEING, {"type": "image_url"}, " is a part of type 'image_url' without an image"),
        (SEEING, {"type": "input_image", "file_id": "f"}, " has a file_id"),
        (SEEING, INPUT_AUDIO, ": the model 'm' does not hear audio: leave it out"),
        (limits_of(None), INPUT_AUDIO, ": the model 'm' does not hear audio: leave it out"),
    ],
)
def test_a_bad_part_is_refused_with_its_place_and_without_its_content(
    limits: MediaLimits, part: Any, complaint: str
) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[0\]" + complaint) as caught:
        of_chat(limits, part)
    assert BASE64 not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "whole", "broken"),
    [
        ("image", "image", IMAGE, image("data:image/png;base64," + "?" * 4000)),
        ("audio", "audio clip", INPUT_AUDIO, {"type": "input_audio", "input_audio": {"data": "?" * 4000}}),
    ],
)
def test_numbers_and_bytes_are_checked_before_anything_is_decoded(
    kind: MediaKind, name: str, whole: Any, broken: Any
) -> None:
    with pytest.raises(RequestError, match=rf"content\[0\]: an {name} has 29.. bytes, at most 1000 are read"):
        of_chat(limits_of(kind), broken)
    with pytest.raises(RequestError, match=rf"content\[1\]: the prompt has 2 {name}s, at most 1 are allowed"):
        of_chat(limits_of(kind, 1), whole, broken)
