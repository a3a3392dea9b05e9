"""Audio files for tests: ordinary, damaged and hostile ones."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
import soundfile

FORMATS = {
    "FLAC": ("FLAC", "PCM_16"),
    "Ogg Vorbis": ("OGG", "VORBIS"),
    "Ogg Opus": ("OGG", "OPUS"),
    "MP3": ("MP3", None),
}


def tone(seconds: float, rate: int, hertz: float = 440.0, amplitude: float = 0.5) -> Any:
    """Return a sine: float32 [samples]."""
    times = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def stored(samples: Any, rate: int, form: str, kind: str | None = None) -> bytes:
    """Write samples, [n] or [n, channels], by libsndfile, in its names of format and of sample."""
    buffer, step = io.BytesIO(), 1 << 15  # libsndfile fails for very large blocks of Vorbis
    num_channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(buffer, "w", rate, num_channels, subtype=kind, format=form) as file:
        for begin in range(0, len(samples), step):
            file.write(samples[begin : begin + step])
    return buffer.getvalue()


def compressed(samples: Any, rate: int, name: str) -> bytes:
    """Write samples in a format of FORMATS."""
    return stored(samples, rate, *FORMATS[name])


def pcm_wav(integers: Any, rate: int, width: int) -> bytes:
    """Write integers, [n] or [n, channels], as `width` bytes each, by Python's own library."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if integers.ndim == 1 else integers.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        raw = integers.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width]
        file.writeframes(raw.tobytes())
    return buffer.getvalue()


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """Return a chunk of a WAV file; its size may lie."""
    size = len(content) if size is None else size
    return struct.pack("<4sI", name, size) + content + bytes(len(content) % 2)


def form(
    codec: int = 1, channels: int = 1, rate: int = 16_000, frame_bytes: int = 2, bits: int = 16, more: bytes = b""
) -> bytes:
    """Return the chunk that describes the samples of a WAV file."""
    fields = struct.pack("<HHIIHH", codec, channels, rate, min(rate * frame_bytes, 2**32 - 1), frame_bytes, bits)
    return chunk(b"fmt ", fields + more)


def riff(*chunks: bytes, size: int | None = None) -> bytes:
    """Return a WAV file of these chunks."""
    content = b"WAVE" + b"".join(chunks)
    return struct.pack("<4sI", b"RIFF", len(content) if size is None else size) + content


def with_num_samples(flac: bytes, count: int) -> bytes:
    """Let the header of a FLAC file say another number of samples, of 36 bits."""
    changed = bytearray(flac)
    changed[21] = changed[21] & 0xF0 | count >> 32
    changed[22:26] = struct.pack(">I", count & 0xFFFF_FFFF)
    return bytes(changed)
