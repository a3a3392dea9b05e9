"""Audio in the forms of OpenAI, vLLM and Hugging Face is the same media in the same places."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.anthropic.forms.request_body import MessagesRequest
from tokenloom.frontend.anthropic.forms.request_body import chat_request as chat_of_messages
from tokenloom.frontend.client.media.held_medium import HeldMedium
from tokenloom.frontend.openai.forms.messages import ChatInput, chat_input
from tokenloom.frontend.openai.forms.response_body import ResponsesRequest, chat_request
from tokenloom.frontend.openai.forms.schema import ChatRequest, TokenizeRequest
from tokenloom.frontend.text.media_limits import MediaLimits
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import MediaPart, Medium, TextPart

DATA = b"bytes of a clip"
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:audio/wav;base64,{BASE64}"
TEXT = {"type": "text", "text": "a"}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
FORMS = [
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


def hearing(max_count: int | None = None, max_bytes: int = 1000) -> MediaLimits:
    return MediaLimits(model="m", kind="audio", off_by={}, max_count=max_count, max_bytes=max_bytes)


def of_chat(*parts: Any, limits: MediaLimits | None = None, kind: Any = ChatRequest) -> ChatInput:
    return chat_input(msgspec.convert({"messages": [{"role": "user", "content": [*parts]}]}, kind), limits or hearing())


def check(found: ChatInput) -> None:
    """Assert that a chat has one clip after a text."""
    assert found.turns[0].parts == [TextPart("a"), MediaPart(0)]
    (medium,) = found.media
    assert isinstance(medium, HeldMedium) and medium.data == DATA and medium.kind == "audio"


@pytest.mark.parametrize("part", FORMS)
def test_every_form_gives_the_bytes_of_the_file(part: Any) -> None:
    check(of_chat(TEXT, part))
    check(of_chat(TEXT, part, kind=TokenizeRequest))


def test_a_response_takes_audio_as_a_chat_does() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, INPUT_AUDIO]}]
    check(chat_input(chat_request(msgspec.convert({"input": items}, ResponsesRequest)), hearing()))


def test_uuids_are_kept_and_urls_are_not_fetched_here() -> None:
    found = of_chat(
        INPUT_AUDIO | {"uuid": "u"},
        {"type": "audio_url", "audio_url": {"url": "https://a.example/b.mp3"}},
        {"type": "audio_url", "uuid": "v"},
    )
    first, *others = found.media
    assert first.uuid == "u"
    assert others == [Medium(kind="audio", url="https://a.example/b.mp3"), Medium(kind="audio", uuid="v")]


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"type": "audio", "audio": "/etc/passwd"}, r"\[0\]: the audio clip '/etc/passwd' is no data:"),
        ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, r"\[0\]: a data: URL is not base64"),
        (
            {"type": "input_audio", "input_audio": {"format": "wav"}},
            r"\[0\] is a part of type 'input_audio' without an",
        ),
        ({"type": "audio"}, r"\[0\] is a part of type 'audio' without an audio clip: give its URL or its data"),
        ({"type": "input_audio", "file_id": "f"}, r"\[0\] has a file_id: this engine stores no files, give the audio"),
        (
            {"type": "image_url", "image_url": {"url": URL}},
            r"\[0\]: the model 'm' does not see images: leave them out",
        ),
        ({"type": "video_url", "video_url": {"url": URL}}, r"\[0\] is a part of type 'video_url', which is not served"),
        ({"type": "audio", "path": "/etc/passwd"}, r"\[0\] is a part of type 'audio' without"),
    ],
)
def test_a_bad_part_is_refused_with_its_place_and_without_its_content(part: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content" + complaint) as caught:
        of_chat(part)
    assert BASE64 not in str(caught.value)


def test_numbers_and_bytes_are_checked_before_anything_is_decoded() -> None:
    broken = {"type": "input_audio", "input_audio": {"data": "?" * 4000, "format": "wav"}}
    with pytest.raises(RequestError, match=r"content\[0\]: an audio clip has 29.. bytes, at most 1000 are read"):
        of_chat(broken)
    with pytest.raises(RequestError, match=r"content\[1\]: the prompt has 2 audio clips, at most 1 are allowed"):
        of_chat(INPUT_AUDIO, broken, limits=hearing(max_count=1))


def test_a_text_model_refuses_audio_and_an_audio_model_anthropics_images() -> None:
    text = MediaLimits(model="m", kind=None, off_by={}, max_count=None, max_bytes=1000)
    with pytest.raises(RequestError, match=r"content\[0\]: the model 'm' does not hear audio: leave it out"):
        of_chat(INPUT_AUDIO, limits=text)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    with pytest.raises(RequestError, match=r"content\[0\]: the model 'm' does not see images: leave them out"):
        chat_input(chat_of_messages(msgspec.convert(body, MessagesRequest)), hearing())
