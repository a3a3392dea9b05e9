"""Format, size and number of frames of an image file, read from its first bytes and its structure: no pixel is decoded.

Served are PNG, JPEG, WebP and GIF. The refusal of another format names it, if its first bytes show it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from .....ipc.errors import RequestError

MAX_FRAMES = 1000  # of an animation, whose first frame is read
SERVED = "send PNG, JPEG, WebP or GIF"
OTHERS = {  # first bytes of formats that are not served
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"BM": "BMP",
    b"%PDF": "PDF",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"<svg": "SVG",
    b"<?xml": "SVG or other XML",
    b"<!DOCTYPE": "HTML",
    b"<html": "HTML",
    b"%!PS": "PostScript",
}
BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"mp42": "MP4"}
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of JPEG
STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length


class ImageHeader(NamedTuple):
    """Facts from the header of an image file. `format` is Pillow's name."""

    format: str
    width: int
    height: int
    num_frames: int = 1  # counted up to MAX_FRAMES + 1


class _Damaged(Exception):
    """Error: the header is cut off or contradicts itself."""


def read_header(data: bytes | memoryview, max_pixels: int) -> ImageHeader:
    """Read the header of an image file; RequestError if the format is not served, or an image is too large, empty, cut
    off in its header or has too many frames."""
    head = bytes(data[:32])
    reader = next((each for magic, each in _READERS if head.startswith(magic)), None)
    if head.startswith(b"RIFF"):
        reader = _webp if head[8:12] == b"WEBP" else None
    if reader is None:
        raise RequestError(_unserved(head, len(data)))
    try:
        header = reader(memoryview(data))
    except (_Damaged, struct.error, IndexError):
        raise RequestError(f"the image of {len(data)} bytes ends or breaks off in its header: send all of it") from None
    size = f"{header.width} × {header.height} pixels"
    if min(header.width, header.height) < 1:
        raise RequestError(f"the {header.format} image has {size}: send one with at least 1 × 1")
    if header.width * header.height > max_pixels:
        raise RequestError(
            f"the {header.format} image has {size}, {header.width * header.height} in all, --max-image-pixels is "
            f"{max_pixels}: send a smaller one or raise --max-image-pixels"
        )
    if header.num_frames > MAX_FRAMES:
        raise RequestError(
            f"the {header.format} image has over {MAX_FRAMES} frames, of which the first would be read: send it alone"
        )
    return header


def _unserved(head: bytes, num_bytes: int) -> str:
    if not num_bytes:
        return f"the image has 0 bytes: {SERVED}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    found = next((name for magic, name in OTHERS.items() if text.startswith(magic) or head.startswith(magic)), None)
    if head[4:8] == b"ftyp":
        found = BRANDS.get(head[8:12], "MP4 or another ISO container")
    if found is None:
        return f"the {num_bytes} bytes are no image of a known format: {SERVED}"
    return f"the image is {found}, which is not served: {SERVED}"


def _png(data: memoryview) -> ImageHeader:
    if bytes(data[12:16]) != b"IHDR":
        raise _Damaged
    width, height = struct.unpack_from(">II", data, 16)
    num_frames, position = 1, 33
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"acTL":
            (num_frames,) = struct.unpack_from(">I", data, position + 8)
        if kind in (b"acTL", b"IDAT", b"IEND"):
            break
        position += 12 + length
    return ImageHeader("PNG", width, height, max(num_frames, 1))


def _jpeg(data: memoryview) -> ImageHeader:
    position = 2
    while True:
        if data[position] != 0xFF:
            raise _Damaged
        while data[position] == 0xFF:  # fill bytes
            position += 1
        marker = data[position]
        position += 1
        if marker in START_OF_FRAME:
            height, width = struct.unpack_from(">HH", data, position + 3)
            return ImageHeader("JPEG", width, height)
        if marker not in STANDALONE:
            (length,) = struct.unpack_from(">H", data, position)
            if length < 2:
                raise _Damaged
            position += length


def _webp(data: memoryview) -> ImageHeader:
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        if len(data) < 30:
            raise _Damaged
        return ImageHeader("WEBP", width, height, _num_webp_frames(data))
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    raise _Damaged


def _num_webp_frames(data: memoryview) -> int:
    num_frames, position = 0, 12
    while position + 8 <= len(data) and num_frames <= MAX_FRAMES:
        kind, length = struct.unpack_from("<4sI", data, position)
        num_frames += kind == b"ANMF"
        position += 8 + length + length % 2
    return max(num_frames, 1)


def _gif(data: memoryview) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _palette_bytes(flags)
    num_frames = 0
    while position < len(data) and num_frames <= MAX_FRAMES:
        kind = data[position]
        if kind == 0x2C:  # an image
            num_frames += 1
            if position + 10 > len(data):
                break
            position += 11 + _palette_bytes(data[position + 9])
        elif kind == 0x21:  # an extension
            position += 2
        else:  # the end, or data that decoders skip
            break
        while position < len(data) and data[position]:
            position += 1 + data[position]
        position += 1
    return ImageHeader("GIF", width, height, max(num_frames, 1))


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


_READERS = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
)
