"""WAV files have the samples that were written, and damaged ones are refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.sound.wav_file import open_wav
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.frontend.server.media.audio.sound_files import chunk, form, pcm_wav, riff, stored

RNG = np.random.default_rng(3)
SAMPLES = RNG.uniform(-1, 1, (70, 2))
DATA = chunk(b"data", SAMPLES[:, 0].astype("<f4").tobytes())
FLOATS = form(codec=3, frame_bytes=4, bits=32)
PIPED = 0xFFFF_FFFF
INTEGERS = RNG.integers(-(2**31), 2**31, (70, 2))
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def read(data: bytes) -> Any:
    """Return all samples: [frames, channels]."""
    sound = open_wav(memoryview(data))
    samples = np.concatenate([*sound.blocks, np.zeros((0, sound.num_channels), np.float32)])
    assert len(samples) == sound.num_frames and samples.dtype == np.float32
    return samples


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_integers_are_fractions_of_their_full_scale(width: int, channels: int) -> None:
    integers = INTEGERS[:, :channels] >> 8 * (4 - width)
    data = pcm_wav(integers + (128 if width == 1 else 0), 22_050, width)
    sound = open_wav(memoryview(data))
    assert (sound.rate, sound.num_channels, sound.num_frames) == (22_050, channels, 70)
    np.testing.assert_array_equal(read(data), (integers / 2.0 ** (8 * width - 1)).astype(np.float32))


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("is_extensible", [False, True])
def test_floats_are_read_as_they_are(width: int, is_extensible: bool) -> None:
    more = struct.pack("<HHIH", 22, 8 * width, 3, 3) + GUID_TAIL if is_extensible else b""
    header = form(0xFFFE if is_extensible else 3, 2, 22_050, 2 * width, 8 * width, more)
    data = riff(header, chunk(b"data", SAMPLES.astype(f"<f{width}").tobytes()))
    np.testing.assert_array_equal(read(data), SAMPLES.astype(np.float32))


def test_long_files_are_read_in_blocks() -> None:
    integers = RNG.integers(-(2**15), 2**15, (300_000, 2))
    blocks = list(open_wav(memoryview(pcm_wav(integers, 16_000, 2))).blocks)
    assert len(blocks) == 3
    np.testing.assert_array_equal(np.concatenate(blocks), (integers / 2**15).astype(np.float32))


@pytest.mark.parametrize(
    "file",
    [
        riff(FLOATS, chunk(b"LIST", b"odd"), DATA),
        riff(chunk(b"JUNK", bytes(28)), FLOATS, chunk(b"fact", bytes(4)), DATA, chunk(b"LIST", b"behind")),
        riff(FLOATS, DATA, size=3),
        riff(form(3, 1, 16_000, 4, 32, struct.pack("<H", 0)), DATA),
        riff(FLOATS, chunk(b"data", DATA[8:], PIPED), size=PIPED),
        riff(FLOATS, chunk(b"data", DATA[8:], 0x7FFF_FFFF), size=0x7FFF_FFFF),
        riff(FLOATS, chunk(b"data", DATA[8:] + b"\1\2\3")),
    ],
    ids=["odd chunk", "other chunks", "size of the file", "long form", "pipe", "pipe of sox", "tail"],
)
def test_other_chunks_and_unknown_sizes_do_not_matter(file: bytes) -> None:
    np.testing.assert_array_equal(read(file)[:, 0], SAMPLES[:, 0].astype(np.float32))


def test_twelve_bits_stand_in_the_high_ones_of_sixteen() -> None:
    data = riff(form(frame_bytes=2, bits=12), chunk(b"data", np.array([2**14, -(2**15)], "<i2").tobytes()))
    np.testing.assert_array_equal(read(data)[:, 0], [0.5, -1])


def extensible(codec: int, tail: bytes = GUID_TAIL) -> bytes:
    more = struct.pack("<HHIH", 22, 16, 0, codec) + tail
    return riff(form(codec=0xFFFE, more=more), chunk(b"data", bytes(8)))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (riff(form(codec=6, frame_bytes=1, bits=8), DATA), "coded as ALAW, which is not served: save it as PCM"),
        (riff(form(codec=7, frame_bytes=1, bits=8), DATA), "coded as ULAW"),
        (stored(SAMPLES, 16_000, "WAV", "IMA_ADPCM"), "coded as IMA_ADPCM"),
        (riff(form(codec=0x55), DATA), "is damaged or cut off .*: send all of it, or save it again"),
        (riff(form(codec=0x1234), DATA), "is damaged or cut off"),
        (extensible(6), "coded as ALAW"),
        (extensible(1, bytes(14)), r"cut off \(File contains data in an unimplemented format.\)"),
        (riff(form(frame_bytes=4, bits=24), DATA), "has 4 bytes for 1 samples of 24 bits: save it as PCM"),
        (riff(form(frame_bytes=5), DATA), "has 5 bytes for 1 samples of 16 bits"),
        (riff(form(codec=3, frame_bytes=2), DATA), "is damaged or cut off"),
        (riff(form(channels=2, frame_bytes=5, bits=16), DATA), "has 5 bytes for 2 samples of 16 bits"),
        (riff(form()), "breaks off in its header"),
        (riff(DATA), "breaks off in its header"),
        (riff(DATA, form()), "breaks off in its header"),
        (riff(*[chunk(b"JUNK", b"")] * 2000, form(), DATA), "breaks off in its header"),
        (riff(chunk(b"fmt ", bytes(4)), DATA), "is damaged or cut off"),
        (riff(FLOATS, chunk(b"data", bytes(400), 1 << 20)), "has 400 of the 1048576 bytes of sound"),
    ],
)
def test_files_that_cannot_be_read_say_why(data: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        open_wav(memoryview(data))


def test_every_beginning_of_a_file_is_refused() -> None:
    data = riff(FLOATS, chunk(b"LIST", b"odd"), DATA)
    for length in range(12, len(data)):
        with pytest.raises(RequestError, match="send all of it"):
            open_wav(memoryview(data[:length]))


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(12, 59), st.integers(0, 255)), min_size=1, max_size=4))
def test_no_header_causes_another_error_than_a_refusal(changes: list[tuple[int, int]]) -> None:
    data = bytearray(riff(FLOATS, chunk(b"LIST", b"odd"), DATA))
    for place, value in changes:
        data[place] = value
    try:
        sound = open_wav(memoryview(bytes(data)))
        sound.check(600)
    except RequestError:
        return
    assert sum(len(block) for block in sound.blocks) == sound.num_frames <= len(data)
