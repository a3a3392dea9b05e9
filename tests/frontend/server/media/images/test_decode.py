"""Image files are decoded as transformers would, and hostile or damaged ones refused with numbers and a mend."""

from __future__ import annotations

import io
import re
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from tokenloom.frontend.server.media.images.decode import decode_image
from tokenloom.frontend.server.media.images.image_header import read_header
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.frontend.server.media.images.image_files import encoded, new_gif, new_pixels, new_png, png_chunk

MAX_PIXELS = 40_000_000
FORMS = ("PNG", "JPEG", "WEBP", "GIF")


def decode(data: bytes) -> Image.Image:
    return decode_image(data, MAX_PIXELS)


def refusal(data: bytes, max_pixels: int = MAX_PIXELS) -> str:
    with pytest.raises(RequestError) as caught:
        decode_image(data, max_pixels)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_header_has_the_size_and_pillow_decodes_it(form: str) -> None:
    for width, height in ((1, 1), (3, 700), (130, 64)):
        data = encoded(new_pixels(width, height), form)
        assert read_header(data, MAX_PIXELS) == (form, width, height, 1)
        assert decode(data).size == (width, height)
        with Image.open(io.BytesIO(data)) as image:
            assert np.array_equal(decode(data), image.convert("RGB"))
    lossless = encoded(new_pixels(9, 5), "WEBP", lossless=True)
    assert read_header(lossless, MAX_PIXELS) == ("WEBP", 9, 5, 1)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_png_becomes_rgb_as_transformers_converts_it(mode: str) -> None:
    rng = np.random.default_rng(3)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 1 << 16, (7, 9), np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (7, 9, 4), np.uint8), "RGBA").convert(mode)
    for options in ({}, {"transparency": 3}) if mode in ("P", "L") else ({},):
        data = encoded(image, "PNG", **options)
        with Image.open(io.BytesIO(data)) as opened:
            assert opened.mode == mode
            expected = convert_to_rgb(opened, return_numpy=True)
        assert np.array_equal(decode(data), expected)


def test_cmyk_becomes_rgb_as_transformers_converts_it() -> None:
    data = encoded(new_pixels(16, 8).convert("CMYK"), "JPEG")
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode(data), convert_to_rgb(image, return_numpy=True))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_image_is_turned_as_its_metadata_ask(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(new_pixels(6, 4), form, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode(data), ImageOps.exif_transpose(image).convert("RGB"))


def test_damaged_metadata_are_ignored() -> None:
    data = encoded(new_pixels(6, 4), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01")
    assert decode(data).size == (6, 4)


UNREADABLE = [
    (b"", "has 0 bytes"),
    (b"II*\0" + bytes(50), "is TIFF, which is not served: send PNG, JPEG, WebP or GIF"),
    (b"MM\0*" + bytes(50), "is TIFF"),
    (b"BM" + bytes(50), "is BMP"),
    (b"  <svg xmlns='...'>", "is SVG"),
    (b"<?xml version='1.0'?><svg/>", "is SVG or other XML"),
    (b"<!DOCTYPE html><html>", "is HTML"),
    (b"%PDF-1.7", "is PDF"),
    (b"\0\0\0\x20ftypavif" + bytes(9), "is AVIF"),
    (b"\0\0\0\x20ftypheic" + bytes(9), "is HEIC"),
    (b"RIFF\0\0\0\0WAVEfmt ", "the 16 bytes are no image of a known format"),
    (bytes(99), "the 99 bytes are no image"),
    (b"iVBORw0KGgoAAAANSUhEUgAA", "the 24 bytes are no image"),
    (b"\x89PNG\r\n\x1a\n" + bytes(30), "breaks off in its header"),
    (b"\x89PNG\r\n\x1a\n" + encoded(new_pixels(9, 9), "JPEG"), "breaks off in its header"),
    (b"\xff\xd8\xff", "breaks off in its header"),
    (b"RIFF\x20\0\0\0WEBPVP8 ", "breaks off in its header"),
    (new_png(0, 5), "has 0 × 5 pixels: send one with at least 1 × 1"),
    (new_png(30_000, 30_000), "30000 × 30000 pixels, 900000000 in all, --max-image-pixels is 40000000"),
    (new_png(4, 4), "is damaged or cut off"),
    (new_gif(1001), "has over 1000 frames"),
    (new_gif(100_000), "has over 1000 frames"),
    (encoded(new_pixels(3, 3), "PNG")[:-30], "PNG image of .* bytes, 3 × 3 pixels, is damaged or cut off"),
]


@pytest.mark.parametrize(("data", "words"), UNREADABLE, ids=[words for _, words in UNREADABLE])
def test_unreadable_files_are_refused(data: bytes, words: str) -> None:
    assert re.search(words, refusal(data))


@pytest.mark.parametrize("form", FORMS)
def test_file_cut_off_anywhere_is_refused_without_its_bytes(form: str) -> None:
    data = encoded(new_pixels(40, 30), form)
    for end in range(1, len(data) - 30, max(1, len(data) // 60)):
        message = refusal(data[:end])
        assert "send" in message and len(message) < 250 and "<_io" not in message


def test_frames_of_webp_and_png_animations_are_limited() -> None:
    assert "over 1000 frames" in refusal(new_png(1, 1, png_chunk(b"acTL", struct.pack(">II", 1001, 0))))
    frames = [new_pixels(4, 4, seed) for seed in range(3)]
    for form in ("WEBP", "GIF", "PNG"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=10)
        assert read_header(data, MAX_PIXELS).num_frames == 3
        assert decode(data).size == (4, 4)
    chunks = b"".join(b"ANMF" + struct.pack("<I", 0) for _ in range(1001))
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(10) + chunks
    assert "over 1000 frames" in refusal(b"RIFF" + struct.pack("<I", len(body)) + body)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_compressed_text_of_png_costs_no_memory(kind: bytes) -> None:
    bomb = zlib.compress(bytes(80 << 20), 9)
    data = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}[kind] + bomb
    plain = encoded(new_pixels(4, 4))
    begun = time.process_time()
    file = plain[:33] + png_chunk(kind, data) + plain[33:]
    try:
        decode(file)
    except RequestError as error:
        assert "is damaged" in str(error)
    assert time.process_time() - begun < 5.0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMS), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_files_are_decoded_or_refused(form: str, changes: list[tuple[float, int]]) -> None:
    data = bytearray(encoded(new_pixels(30, 20), form))
    for place, value in changes:
        data[int(place * (len(data) - 1))] = value
    found: Any
    try:
        found = decode(bytes(data))
    except RequestError as error:
        assert len(str(error)) < 300
    else:
        assert found.mode == "RGB"
