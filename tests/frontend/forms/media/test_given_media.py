"""Images and audio in every form that callers know become media with their bytes, which no message of them contains."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from tokenloom.frontend.forms.media.held_medium import HeldMedium
from tokenloom.frontend.forms.prompts import new_submit
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, ClientMessage, MediaPart, Medium, Submit, TextPart
from tokenloom.ipc.params.sampling_params import SamplingParams

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
        {"type": "input_image", "image_url": URL, "detail": "original"},
        {"type": "image", "image": DATA},
    ]
    submit = submit_of([{"role": "system", "content": content[:2]}, {"role": "user", "content": content[2:]}])
    assert submit.chat == [
        ChatMessage("system", [MediaPart(0), TextPart("between")]),
        ChatMessage("user", [MediaPart(1), MediaPart(2), MediaPart(3)]),
    ]
    assert [medium.detail for medium in submit.media] == ["low", "", "high", ""]
    assert submit.media[0].uuid == "u" and submit.media[0].digest == SHA


def clips_of(audio: object, **more: object) -> list[Medium]:
    return submit_of({"prompt": "a", "multi_modal_data": {"audio": audio}, **more}).media


def sound_of(medium: Medium) -> tuple[Any, int]:
    """Return samples, [frames, channels], and rate as libsndfile reads them."""
    assert medium.kind == "audio" and medium.digest == hashlib.sha256(data_of(medium)).digest()
    samples, rate = soundfile.read(io.BytesIO(data_of(medium)), dtype="float64", always_2d=True)
    return samples, rate


SAMPLES = np.random.default_rng(4).uniform(-1, 1, 50)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i2", ">i2", "i4", "u1"])
@pytest.mark.parametrize("rate", [16_000, 44_100.0, np.int64(8000), np.float32(22_050)])
def test_an_array_travels_as_a_wav_file_of_its_samples(dtype: str, rate: Any) -> None:
    scale = {"i2": 2**15, "i4": 2**31, "u1": 2**7}.get(dtype.lstrip(">"), 1)
    samples = (SAMPLES * (scale - 1) + (128 if dtype == "u1" else 0)).astype(dtype)
    (medium,) = clips_of((samples, rate))
    found, found_rate = sound_of(medium)
    expected = (samples.astype("f8") - (128 if dtype == "u1" else 0)) / scale
    assert found_rate == rate
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 50), (50, 1), (2, 25), (25, 2)])
def test_channels_are_the_smaller_side(shape: tuple[int, int]) -> None:
    samples = SAMPLES.astype("f4").reshape(shape)
    found, _ = sound_of(clips_of((samples, 16_000))[0])
    np.testing.assert_array_equal(found, samples if shape[0] > shape[1] else samples.T)


def test_other_forms_of_samples() -> None:
    tensor = torch.from_numpy(SAMPLES.astype("f4"))
    for given in ((SAMPLES.tolist(), 8000), (tensor, 8000), {"array": SAMPLES, "sampling_rate": 8000, "path": None}):
        found, rate = sound_of(clips_of(given)[0])
        assert rate == 8000
        np.testing.assert_allclose(found[:, 0], SAMPLES, atol=1e-7)
    first, second = clips_of([(SAMPLES, 8000), b"RIFF"])
    assert sound_of(first)[1] == 8000 and data_of(second) == b"RIFF"
    assert clips_of(["https://a.example/b.wav"]) == [Medium(kind="audio", url="https://a.example/b.wav")]
    assert clips_of(None, multi_modal_uuids={"audio": ["u"]}) == [Medium(kind="audio", uuid="u")]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"image": 3}, "of type int: an image is a PIL image"),
        ({"image": b""}, "has no bytes"),
        ({"image": "/no/such.png"}, "'/no/such.png' cannot be read: No such file"),
        ({"image": "data:image/png;base64,!!"}, "is not base64"),
        ({"image": "data:image/png;base64"}, "has no comma"),
        ({"image": [None]}, "is None and has no uuid"),
        ({"video": [1]}, "has video: only image and audio are served"),
        ([DATA], "is of type list"),
        ({"audio": SAMPLES}, "of type ndarray, without its rate: an audio clip is \\(samples, rate\\)"),
        ({"audio": (SAMPLES, 0)}, "rate of an audio clip is 0: give whole samples a second"),
        ({"audio": (SAMPLES, 16_000.5)}, "rate of an audio clip is 16000.5"),
        ({"audio": (SAMPLES, float("nan"))}, "rate of an audio clip is nan"),
        ({"audio": (SAMPLES, "fast")}, "'fast'|of type ndarray"),
        ({"audio": (SAMPLES.astype("i8"), 16_000)}, "are int64: give a numpy array of float32"),
        ({"audio": (SAMPLES.astype("c8"), 16_000)}, "are complex64"),
        ({"audio": (SAMPLES.reshape(5, 5, 2), 16_000)}, "have the shape"),
        ({"audio": (SAMPLES[:49].reshape(7, 7), 16_000)}, "have the shape"),
        ({"audio": (SAMPLES[:0], 16_000)}, "has no samples"),
        ({"audio": ([], 16_000)}, "has no samples"),
        ({"audio": (["a"], 16_000)}, "a list that holds no numbers alone"),
        ({"audio": (3, 16_000)}, "are int: give a numpy array"),
        ({"audio": 3}, "of type int: an audio clip is"),
        ({"audio": Image.new("RGB", (2, 2))}, "of type Image: an audio clip is"),
        ({"audio": b""}, "has no bytes"),
        ({"audio": "/no/such.wav"}, "the audio clip '/no/such.wav' cannot be read"),
    ],
)
def test_what_is_no_image_or_clip_is_refused(data: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        submit_of({"prompt": "a", "multi_modal_data": data})


WAV = b"RIFF\x04\0\0\0WAVE"
WAV64 = base64.b64encode(WAV).decode()


def test_parts_of_a_chat_may_be_clips(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(WAV)
    content = [
        {"type": "input_audio", "input_audio": {"data": WAV64, "format": "wav"}, "uuid": "u"},
        {"type": "text", "text": "between"},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{WAV64}"}},
        {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{WAV64}"},
        {"type": "audio", "audio": WAV},
        {"type": "audio", "audio": path},
        {"type": "audio", "path": path},
        {"type": "audio", "base64": WAV64},
        {"type": "audio", "audio_url": f"data:audio/wav;base64,{WAV64}"},
    ]
    submit = submit_of([{"role": "user", "content": content}])
    assert submit.chat == [
        ChatMessage("user", [MediaPart(0), TextPart("between"), *map(MediaPart, range(1, 8))]),
    ]
    assert [data_of(medium) for medium in submit.media] == [WAV] * 8
    assert {medium.kind for medium in submit.media} == {"audio"} and submit.media[0].uuid == "u"
    array = submit_of([{"role": "user", "content": [{"type": "audio", "audio": (SAMPLES, 8000)}]}])
    assert sound_of(array.media[0])[1] == 8000
    (url,) = submit_of([{"role": "user", "content": [{"type": "audio", "url": "https://a.example/b"}]}]).media
    assert url == Medium(kind="audio", url="https://a.example/b")


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
        ({"type": "audio", "audio": "/etc/passwd"}, "message 0 of the chat: the audio clip '/etc/passwd' is no data:"),
        ({"type": "audio", "path": "/etc/passwd"}, "the audio clip '/etc/passwd' is no data:"),
        ({"type": "input_audio", "input_audio": {"data": "!!", "format": "wav"}}, "data is not base64"),
        ({"type": "input_audio"}, "an audio clip is None and has no uuid"),
        ({"type": "video_url", "video_url": "v"}, "a part of type 'video_url': only text and .* are served"),
    ],
)
def test_a_bad_part_is_refused_with_its_message(part: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        submit_of([{"role": "user", "content": [part]}])


def test_a_client_needs_neither_numpy_nor_pillow() -> None:
    code = (
        "import tokenloom, sys; from tokenloom.frontend.forms.prompts import new_submit\n"
        "from tokenloom.ipc.params.sampling_params import SamplingParams\n"
        "prompt = {'prompt': 'a', 'multi_modal_data': {'audio': ([0.0, 1.0], 16000)}}\n"
        "assert new_submit('r', prompt, SamplingParams()).media\n"
        "assert not {'numpy', 'torch', 'soundfile', 'PIL'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
