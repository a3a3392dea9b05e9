"""Media are refused by kind, number and name of the option, before any of them is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, MediaPart, Medium, Submit, TextPart
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.gguf_index import GGUF_INDEX_NAME
from tokenloom.tests.frontend.server.media.audio.encoders import ENCODERS
from tokenloom.tests.support.engine_specs import new_spec

LIMITS = MediaLimits(model="m", kind="image", off_by={}, max_count=2, max_bytes=100)
HEARING = MediaLimits(model="m", kind="audio", off_by={}, max_count=2, max_bytes=100)
ONE = Medium(digest=bytes(32))
CLIP = Medium(kind="audio", digest=bytes(32))


def submit(*media: Medium, chat: list[ChatMessage] | None = None, **params: Any) -> Submit:
    return Submit(request_id="r", params=SamplingParams(**params), media=[*media], chat=chat)


def chat(*indices: int) -> list[ChatMessage]:
    return [ChatMessage("user", [TextPart("a"), *map(MediaPart, indices)])]


def test_a_model_refuses_the_kind_that_it_does_not_take() -> None:
    text_model = MediaLimits.of(new_spec())
    text_model.check(submit())
    LIMITS.check(submit(ONE))
    HEARING.check(submit(CLIP, CLIP))
    for limits, media in ((HEARING, (CLIP, ONE)), (text_model, (ONE,))):
        with pytest.raises(RequestError, match=r"^the model '(m|sample)' does not see images: leave them out$"):
            limits.check(submit(*media))
    for limits in (LIMITS, text_model):
        with pytest.raises(RequestError, match=r"^the model '(m|sample)' does not hear audio: leave it out$"):
            limits.check(submit(CLIP))


@pytest.mark.parametrize(
    ("limits", "medium", "kind"), [(LIMITS, ONE, "image"), (HEARING, CLIP, "audio clip")], ids=["images", "clips"]
)
def test_numbers_and_bytes_are_bounded(limits: MediaLimits, medium: Medium, kind: str) -> None:
    limits.check(submit(medium, medium))
    limits.check_bytes(100)
    with pytest.raises(RequestError, match=rf"has 3 {kind}s, at most 2 are allowed.*--limit-mm-per-prompt"):
        limits.check(submit(*[medium] * 3))
    with pytest.raises(RequestError, match=rf"an? {kind} has 101 bytes, at most 100 are read.*--max-media-bytes"):
        limits.check_bytes(101)


def test_limits_are_those_of_the_options() -> None:
    spec = new_spec(config=EngineConfig(limit_mm_per_prompt={"audio": 3, "image": 0}))
    audio = ENCODERS["voxtral"]
    limits = MediaLimits.of(msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, audio=audio)))
    assert (limits.kind, limits.max_media) == ("audio", {"audio": 3, "image": 0})
    with pytest.raises(RequestError, match="does not see images, as --limit-mm-per-prompt says"):
        limits.check(submit(ONE))


@pytest.mark.parametrize(
    ("mmproj", "words"),
    [
        ("auto", r"does not see images without an mmproj file, which a GGUF model .* beside it .* or gets by --mmproj"),
        ("none", "does not see images, as --mmproj none says: leave them out"),
    ],
)
def test_a_gguf_model_without_an_encoder_says_which_file_is_missing(tmp_path: Path, mmproj: str, words: str) -> None:
    (tmp_path / GGUF_INDEX_NAME).write_text("{}")
    spec = new_spec(config=EngineConfig(mmproj=mmproj))
    limits = MediaLimits.of(msgspec.structs.replace(spec, model_folder=str(tmp_path)))
    with pytest.raises(RequestError, match=words):
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
    hears = "does not hear audio, as" if config.language_model_only else "does not hear audio: leave"
    with pytest.raises(RequestError, match=hears):
        MediaLimits.of(new_spec(config=config)).check(submit(CLIP))


@pytest.mark.parametrize("indices", [(), (0,), (0, 0), (0, 1, 1), (0, 2), (-1, 0)])
def test_each_image_of_a_chat_has_one_part(indices: tuple[int, ...]) -> None:
    LIMITS.check(submit(ONE, ONE, chat=chat(1, 0)))
    with pytest.raises(RequestError, match=f"the chat has {len(indices)} parts of media, the request 2 media"):
        LIMITS.check(submit(ONE, ONE, chat=chat(*indices)))


@pytest.mark.parametrize(
    ("limits", "refused", "words"),
    [
        (HEARING, submit(Medium(kind="audio", uuid="u", detail="low")), "the detail low is given for an audio clip"),
        (LIMITS, submit(ONE, truncate_prompt_tokens=5), "truncate_prompt_tokens cannot cut"),
        (LIMITS, submit(Medium()), "needs the SHA-256"),
        (LIMITS, submit(Medium(digest=b"short")), "needs the SHA-256"),
    ],
)
def test_media_have_a_source_clips_no_detail_and_their_prompts_are_not_truncated(
    limits: MediaLimits, refused: Submit, words: str
) -> None:
    LIMITS.check(submit(Medium(url="http://a"), Medium(uuid="u")))
    LIMITS.check(submit(truncate_prompt_tokens=5))
    with pytest.raises(RequestError, match=words):
        limits.check(refused)
