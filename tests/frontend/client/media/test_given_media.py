"""Images in every form that callers know become media with their bytes, which no message of them contains."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tokenloom.frontend.client.media.held_medium import HeldMedium
from tokenloom.frontend.client.prompts import new_submit
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, ClientMessage, MediaPart, Medium, Submit, TextPart
from tokenloom.ipc.sampling_params import SamplingParams

DATA = b"\x89PNG bytes"
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()
SHA = hashlib.sha256(DATA).digest()


def submit_of(prompt: Any) -> Submit:
    return new_submit("r", prompt, SamplingParams())


def media_of(image: object, **more: object) -> list[Medium]:
    return submit_of({"prompt": "a", "multi_modal_data": {"image": image}, **more}).media


def data_of(medium: Medium) -> bytes:
    assert isinstance(medium, HeldMedium)
    return medium.data


def test_each_form_gives_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)
    for form in (DATA, bytearray(DATA), memoryview(DATA), path, str(path), URL):
        (medium,) = media_of(form)
        assert data_of(medium) == DATA and medium.digest == SHA
    assert media_of([DATA, "https://a.example/b.png"])[1] == Medium(url="https://a.example/b.png")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK", "YCbCr"])
def test_a_pil_image_travels_as_a_png_of_its_pixels(mode: str) -> None:
    image = Image.new("RGB", (5, 3), (200, 10, 30)).convert("L" if mode == "I;16" else mode)
    image = image.convert(mode)
    (medium,) = media_of(image)
    with Image.open(io.BytesIO(data_of(medium))) as read:
        assert read.format == "PNG"
        assert read.convert("RGB").tobytes() == image.convert("RGB").tobytes()


def test_the_message_has_the_digest_and_no_bytes() -> None:
    frame = encode(submit_of({"prompt": "a", "multi_modal_data": {"image": DATA}}))
    assert DATA not in frame
    decoded = Decoder[ClientMessage](ClientMessage).decode(frame)
    assert isinstance(decoded, Submit) and decoded.media == [Medium(digest=SHA)]


def test_uuids_go_with_their_images_or_stand_for_them() -> None:
    data = {"multi_modal_uuids": {"image": ["u", None]}}
    first, second = media_of([DATA, DATA], **data)
    assert (first.uuid, second.uuid) == ("u", "")
    assert media_of(None, multi_modal_uuids={"image": "u"}) == [Medium(uuid="u")]
    assert media_of([None, DATA], multi_modal_uuids={"image": ["u", "v"]})[0] == Medium(uuid="u")


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"image": 3}, "of type int: an image is a PIL image"),
        ({"image": b""}, "has no bytes"),
        ({"image": "/no/such.png"}, "'/no/such.png' cannot be read: No such file"),
        ({"image": "data:image/png;base64,!!"}, "is not base64"),
        ({"image": "data:image/png;base64"}, "has no comma"),
        ({"image": [None]}, "is None and has no uuid"),
        ({"video": [1]}, "has video: only image and audio are served"),
        ([DATA], "is of type list"),
    ],
)
def test_what_is_no_image_is_refused(prompt: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        submit_of({"prompt": "a", "multi_modal_data": prompt})


def test_uuids_and_images_must_be_as_many() -> None:
    with pytest.raises(RequestError, match="2 images have 1 uuids"):
        media_of([DATA, DATA], multi_modal_uuids={"image": ["u"]})
    with pytest.raises(RequestError, match="--mm-processor-kwargs"):
        media_of(DATA, mm_processor_kwargs={"a": 1})


def test_parts_of_a_chat_keep_their_places() -> None:
    image = Image.new("RGB", (2, 2))
    content = [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "u"},
        {"type": "text", "text": "between"},
        {"type": "image_pil", "image_pil": image},
        {"type": "input_image", "image_url": URL, "detail": "high"},
        {"type": "image", "image": DATA},
    ]
    submit = submit_of([{"role": "system", "content": content[:2]}, {"role": "user", "content": content[2:]}])
    assert submit.chat == [
        ChatMessage("system", [MediaPart(0), TextPart("between")]),
        ChatMessage("user", [MediaPart(1), MediaPart(2), MediaPart(3)]),
    ]
    assert [medium.detail for medium in submit.media] == ["low", "", "high", ""]
    assert submit.media[0].uuid == "u" and submit.media[0].digest == SHA


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (
            {"type": "image_url", "image_url": "/etc/passwd"},
            "message 0 of the chat: the image '/etc/passwd' is no data:",
        ),
        ({"type": "image", "image": "a.png"}, "is no data:"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "detail of an image is 'huge'"),
        ({"type": "image_url"}, "is None and has no uuid"),
    ],
)
def test_a_bad_part_is_refused_with_its_message(part: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        submit_of([{"role": "user", "content": [part]}])


def test_a_client_needs_no_pillow() -> None:
    code = "import tokenloom.frontend.client.client as c, sys; assert not any(m.startswith('PIL') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
