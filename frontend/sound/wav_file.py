"""WAV files: PCM of 8, 16, 24 and 32 bits and floats of 32 and 64, also in the form WAVE_FORMAT_EXTENSIBLE.

A file is a list of chunks, each a name of 4 bytes, its size as uint32 and its content, padded to an even size; `fmt `
describes the samples and `data` holds them. A program that writes to a pipe does not know the size of its data: it
writes a very large one, or 0 in all places, and the data go to the end of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...ipc.errors import RequestError
from .sound import BLOCK_SAMPLES, MAX_CHANNELS, Samples, Sound

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # follows the codec in WAVE_FORMAT_EXTENSIBLE
CODECS = {  # that are not served
    0x02: "ADPCM",
    0x06: "A-law",
    0x07: "µ-law",
    0x11: "IMA ADPCM",
    0x31: "GSM",
    0x50: "MPEG layer II",
    0x55: "MP3",
    0xFF: "AAC",
    0x161: "WMA",
    0x2000: "AC-3",
}
STREAMED_BYTES = 0x7FFF_0000  # a chunk of at least these has an unknown size
MAX_CHUNKS = 1000
SERVED = "save it as PCM of 8, 16, 24 or 32 bits, or as floats of 32 or 64"


class _Form(NamedTuple):
    """How samples are stored."""

    codec: int  # PCM or FLOAT
    num_channels: int
    rate: int
    frame_bytes: int  # of one sample of each channel
    sample_bytes: int


class _Damaged(Exception):
    """The header is cut off or contradicts itself."""


def open_wav(data: memoryview) -> Sound:
    """Read the header of a WAV file; RequestError if it is damaged or cut off, or its codec not served."""
    try:
        form, content = _parse(data)
    except (_Damaged, struct.error):
        raise RequestError(f"the WAV file of {len(data)} bytes breaks off in its header: send all of it") from None
    num_frames = len(content) // max(form.frame_bytes, 1)
    return Sound("WAV", form.rate, form.num_channels, num_frames, _blocks(form, content, num_frames))


def _parse(data: memoryview) -> tuple[_Form, memoryview]:
    form, place = None, 12
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    for _ in range(MAX_CHUNKS):
        name, size = struct.unpack_from("<4sI", data, place)
        content = data[place + 8 : place + 8 + size]
        if name == b"fmt ":
            form = _form(content)
        if name == b"data" and form is not None:
            is_streamed = size >= STREAMED_BYTES or (size == 0 and riff_bytes in (0, 0xFFFF_FFFF))
            if is_streamed:
                content = data[place + 8 :]
            elif len(content) < size:
                raise RequestError(
                    f"the WAV file has {len(content)} of the {size} bytes of sound that its header says: send all of it"
                )
            return form, content
        place += 8 + size + size % 2
    raise _Damaged


def _form(content: memoryview) -> _Form:
    codec, num_channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", content)
    if codec == EXTENSIBLE:
        (codec,) = struct.unpack_from("<H", content, 24)
        if content[26:40] != GUID_TAIL:
            codec = EXTENSIBLE
    if not 1 <= num_channels <= MAX_CHANNELS:
        return _Form(codec, num_channels, rate, 0, 0)  # to be refused by this number
    if codec not in (PCM, FLOAT):
        name = CODECS.get(codec, f"codec {codec:#06x}")
        raise RequestError(f"the WAV audio is coded as {name}, which is not served: {SERVED}")
    sample_bytes, rest = divmod(frame_bytes, num_channels)
    if sample_bytes not in ((1, 2, 3, 4) if codec == PCM else (4, 8)):
        kind = "integers" if codec == PCM else "floats"
        raise RequestError(f"the WAV audio has {kind} of {8 * sample_bytes} bits, which are not served: {SERVED}")
    if rest or not 8 * (sample_bytes - 1) < bits <= 8 * sample_bytes:
        raise _Damaged
    return _Form(codec, num_channels, rate, frame_bytes, sample_bytes)


def _blocks(form: _Form, content: memoryview, num_frames: int) -> Iterator[Samples]:
    step = max(1, BLOCK_SAMPLES // form.num_channels)
    for begin in range(0, num_frames, step):
        end = min(begin + step, num_frames)
        raw = content[begin * form.frame_bytes : end * form.frame_bytes]
        yield _decoded(form, raw).reshape(-1, form.num_channels)


def _decoded(form: _Form, raw: memoryview) -> Samples:
    if form.codec == FLOAT:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
            return np.frombuffer(raw, f"<f{form.sample_bytes}").astype(np.float32)
    if form.sample_bytes == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) * np.float32(2**-7)
    if form.sample_bytes == 3:
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0].astype(np.float32) * np.float32(2**-31)
    integers = np.frombuffer(raw, f"<i{form.sample_bytes}").astype(np.float32)
    return integers * np.float32(2.0 ** (1 - 8 * form.sample_bytes))
