"""Images are refused by number and by name of the option, before any of them is read."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.frontend.text.media_limits import MediaLimits
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, MediaPart, Medium, Submit, TextPart
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.support.engine_specs import new_spec

LIMITS = MediaLimits(model="m", kind="image", off_by={}, max_count=2, max_bytes=100)
ONE = Medium(digest=bytes(32))


def submit(*media: Medium, chat: list[ChatMessage] | None = None, **params: Any) -> Submit:
    return Submit(request_id="r", params=SamplingParams(**params), media=[*media], chat=chat)


def chat(*indices: int) -> list[ChatMessage]:
    return [ChatMessage("user", [TextPart("a"), *map(MediaPart, indices)])]


def test_a_text_model_refuses_images_by_its_name() -> None:
    limits = MediaLimits.of(new_spec())
    limits.check(submit())
    with pytest.raises(RequestError, match=r"^the model 'sample' does not see images: leave them out$"):
        limits.check(submit(ONE))


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("--language-model-only", EngineConfig(language_model_only=True)),
        ("--limit-mm-per-prompt", EngineConfig(limit_mm_per_prompt={"image": 0})),
    ],
)
def test_a_model_whose_images_are_off_names_the_option(option: str, config: EngineConfig) -> None:
    with pytest.raises(RequestError, match=f"does not see images, as {option} says"):
        MediaLimits.of(new_spec(config=config)).check(submit(ONE))


def test_numbers_and_bytes_are_bounded() -> None:
    LIMITS.check(submit(ONE, ONE))
    LIMITS.check_bytes(100)
    with pytest.raises(RequestError, match=r"has 3 images, at most 2 are allowed.*--limit-mm-per-prompt"):
        LIMITS.check(submit(ONE, ONE, ONE))
    with pytest.raises(RequestError, match=r"has 101 bytes, at most 100 are read.*--max-media-bytes"):
        LIMITS.check_bytes(101)


@pytest.mark.parametrize("indices", [(), (0,), (0, 0), (0, 1, 1), (0, 2), (-1, 0)])
def test_each_image_of_a_chat_has_one_part(indices: tuple[int, ...]) -> None:
    LIMITS.check(submit(ONE, ONE, chat=chat(1, 0)))
    with pytest.raises(RequestError, match=f"the chat has {len(indices)} parts of media, the request 2 media"):
        LIMITS.check(submit(ONE, ONE, chat=chat(*indices)))


@pytest.mark.parametrize("medium", [Medium(), Medium(digest=b"short")])
def test_an_image_needs_a_source(medium: Medium) -> None:
    LIMITS.check(submit(Medium(url="http://a"), Medium(uuid="u")))
    with pytest.raises(RequestError, match="needs the SHA-256"):
        LIMITS.check(submit(medium))


def test_a_prompt_with_images_is_not_truncated() -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens cannot cut"):
        LIMITS.check(submit(ONE, truncate_prompt_tokens=5))
    LIMITS.check(submit(truncate_prompt_tokens=5))
