"""Detection of an audio file's format from its first bytes.

WAV, FLAC, Ogg with Vorbis or Opus, and MP3 are served. The refusal of another format, a video or an image names the
format, if its first bytes show it.
"""

from __future__ import annotations

from ...ipc.errors import RequestError

SERVED = "send WAV, FLAC, Ogg (Vorbis or Opus) or MP3"
OTHERS = {  # first bytes → name of a format that is not served
    b"RF64": "WAV of 64 bits (RF64)",
    b"BW64": "WAV of 64 bits (BW64)",
    b"RIFX": "big-endian WAV (RIFX)",
    b"riff": "Wave64",
    b"FORM": "AIFF",
    b".snd": "Sun AU",
    b"caff": "CAF",
    b"#!AMR": "AMR",
    b"MThd": "MIDI",
    b"MAC ": "Monkey's Audio",
    b"wvpk": "WavPack",
    b"TTA1": "True Audio",
    b"DSD ": "DSD",
    b"ADIF": "AAC",
    b"\x30\x26\xb2\x75": "ASF (WMA or WMV)",
    b"\x1a\x45\xdf\xa3": "a video container (Matroska or WebM)",
    b"FLV": "a Flash video",
    b"\0\0\1\xba": "an MPEG video",
    b"\0\0\1\xb3": "an MPEG video",
    b".RMF": "a RealMedia video",
    b"\x89PNG": "PNG, an image",
    b"\xff\xd8\xff": "JPEG, an image",
    b"GIF8": "GIF, an image",
    b"%PDF": "PDF",
    b"<svg": "SVG, an image",
    b"<?xml": "XML",
    b"<!DOCTYPE": "HTML",
    b"<html": "HTML",
    b"PK\3\4": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
}
IN_RIFF = {b"AVI ": "an AVI video", b"WEBP": "WebP, an image"}
IN_OGG = {  # start of the first packet → format
    b"\x01vorbis": "Ogg Vorbis",
    b"OpusHead": "Ogg Opus",
}
OTHERS_IN_OGG = {
    b"\x80theora": "an Ogg video (Theora)",
    b"fishead": "an Ogg video",
    b"Speex": "Ogg Speex",
    b"\x7fFLAC": "Ogg FLAC",
}
BRANDS = {b"M4A ": "M4A", b"M4B ": "M4B", b"qt  ": "a QuickTime video", b"avif": "AVIF, an image"}
TS_PACKET_BYTES = 188  # packets of an MPEG transport stream; each starts with 0x47
ID3_BYTES = 10


def format_of(data: memoryview) -> str:
    """Return "WAV", "FLAC", "Ogg Vorbis", "Ogg Opus" or "MP3"; RequestError for another format."""
    begin = _after_tags(data)
    head = bytes(data[begin : begin + 64])
    if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
        return "WAV"
    if head.startswith(b"fLaC"):
        return "FLAC"
    if head.startswith(b"OggS"):
        found = next((name for magic, name in IN_OGG.items() if _first_packet(head).startswith(magic)), None)
        if found is not None:
            return found
    if _mpeg_layer(head) == 3 or (begin and not _name(head, data[begin:])):
        return "MP3"
    if not len(data):
        raise RequestError(f"the audio clip has 0 bytes: {SERVED}")
    if name := _name(head, data[begin:]):
        raise RequestError(f"the audio clip is {name}, which is not served: {SERVED}")
    raise RequestError(f"the {len(data)} bytes are no audio of a known format: {SERVED}")


def _name(head: bytes, data: memoryview) -> str:
    """Return the name of a format that is not served; "" if the format is unknown."""
    if head.startswith(b"RIFF"):
        return IN_RIFF.get(head[8:12], "another file in RIFF")
    if head.startswith(b"OggS"):
        packet = _first_packet(head)
        return next((name for magic, name in OTHERS_IN_OGG.items() if packet.startswith(magic)), "Ogg without audio")
    if head[4:8] == b"ftyp":
        return BRANDS.get(head[8:12], "a video container (MP4 or another of ISO)")
    if head[:1] == b"\x47" and bytes(data[TS_PACKET_BYTES : TS_PACKET_BYTES + 1]) == b"\x47":
        return "a video container (MPEG transport stream)"
    layer = _mpeg_layer(head)
    if layer is not None:
        return "AAC" if layer == 0 else f"MPEG audio of layer {layer}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((name for magic, name in OTHERS.items() if text.startswith(magic) or head.startswith(magic)), "")


def _first_packet(head: bytes) -> bytes:
    """Return the start of the first packet of an Ogg file, which follows the page's segment table."""
    return head[27 + head[26] :] if len(head) > 26 else b""


def _after_tags(data: memoryview) -> int:
    """Return the offset of the content after ID3 tags; a tag's size has 7 bits per byte."""
    place = 0
    while bytes(data[place : place + 3]) == b"ID3" and len(data) >= place + ID3_BYTES:
        high, *others = (byte & 0x7F for byte in data[place + 6 : place + ID3_BYTES])
        size = high
        for each in others:
            size = size << 7 | each
        place += ID3_BYTES + size
    return place


def _mpeg_layer(head: bytes) -> int | None:
    """Return the layer in a frame header of MPEG audio, 0 for AAC; None if `head` is not such a header."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    if layer == 0:
        return 0 if head[1] & 0xF6 == 0xF0 else None
    is_valid = version != 1 and head[2] >> 4 not in (0, 15) and head[2] >> 2 & 3 != 3
    return 4 - layer if is_valid else None
