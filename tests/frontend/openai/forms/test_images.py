"""Images in the forms of the three APIs are the same media in the same places."""

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
from tokenloom.frontend.openai.forms.schema import ChatRequest
from tokenloom.frontend.text.media_limits import MediaLimits
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import MediaPart, TextPart

DATA = b"bytes of an image"
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{BASE64}"
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "u"}


def seeing(max_images: int | None = None, max_bytes: int = 1000) -> MediaLimits:
    return MediaLimits(model="m", kind="image", off_by={}, max_count=max_images, max_bytes=max_bytes)


def of_chat(*parts: Any, limits: MediaLimits | None = None) -> ChatInput:
    body = {"messages": [{"role": "user", "content": [*parts]}]}
    return chat_input(msgspec.convert(body, ChatRequest), limits or seeing())


def of_response(items: list[Any]) -> ChatInput:
    return chat_input(chat_request(msgspec.convert({"input": items}, ResponsesRequest)), seeing())


def of_messages(**body: Any) -> ChatInput:
    return chat_input(chat_of_messages(msgspec.convert({"max_tokens": 1, **body}, MessagesRequest)), seeing())


def check(found: ChatInput, *roles: str) -> None:
    """Assert that a chat has one image in the turn of each role, after a text."""
    assert [turn.role for turn in found.turns if any(isinstance(part, MediaPart) for part in turn.parts)] == [*roles]
    assert all(turn.parts[-2:] == [TextPart("a"), MediaPart(i)] for i, turn in enumerate(found.turns))
    assert all(isinstance(medium, HeldMedium) and medium.data == DATA for medium in found.media)
    assert len(found.media) == len(roles)


def test_the_three_apis_give_the_same_media() -> None:
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": BASE64}}
    check(of_chat(TEXT, IMAGE), "user")
    written = {"type": "input_text", "text": "a"}
    check(of_response([{"role": "user", "content": [written, {"type": "input_image", "image_url": URL}]}]), "user")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, source]}
    turns = [{"role": "user", "content": [result]}, {"role": "user", "content": [TEXT, source]}]
    check(of_messages(system=[TEXT, source], messages=turns), "system", "tool", "user")
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [written, {"type": "input_image", "image_url": URL}],
    }
    check(of_response([output]), "tool")


def test_uuid_and_detail_are_kept_and_urls_are_not_fetched_here() -> None:
    (first, second, third) = of_chat(
        IMAGE, {"type": "image_url", "image_url": "https://a.example/b.png"}, {"type": "image_url", "uuid": "v"}
    ).media
    assert (first.uuid, first.detail) == ("u", "low")
    assert second.url == "https://a.example/b.png" and not second.digest
    assert third.uuid == "v" and not third.digest
    (medium,) = of_messages(
        messages=[
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.example/c"}}]}
        ]
    ).media
    assert medium.url == "https://a.example/c"


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, r"\[0\]: the image '/etc/passwd' is no data:"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}},
            r"\[0\]: a data: URL is not base64",
        ),
        ({"type": "image_url"}, r"\[0\] is a part of type 'image_url' without an image"),
        ({"type": "input_image", "file_id": "f"}, r"\[0\] has a file_id"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "big"}}, r"\[0\]: the detail of an image is 'big'"),
        ({"type": "input_audio"}, r"\[0\] is a part of type 'input_audio' without an audio clip"),
        (
            {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
            r"\[0\]: the model 'm' does not hear audio: leave it out",
        ),
        ({"type": "video_url", "url": "v"}, r"\[0\] is a part of type 'video_url', which is not served"),
    ],
)
def test_a_bad_image_is_refused_with_its_place_and_without_its_content(part: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content" + complaint) as caught:
        of_chat(part)
    assert BASE64 not in str(caught.value)


def test_numbers_and_bytes_are_checked_before_anything_is_decoded() -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "?" * 4000}}
    with pytest.raises(RequestError, match=r"content\[0\]: an image has 29.. bytes, at most 1000 are read"):
        of_chat(broken)
    with pytest.raises(RequestError, match=r"content\[1\]: the prompt has 2 images, at most 1 are allowed"):
        of_chat(IMAGE, broken, limits=seeing(max_images=1))
