"""Write segments as subtitles: SubRip (srt) and WebVTT (vtt, https://www.w3.org/TR/webvtt1/)."""

from __future__ import annotations

from collections.abc import Iterable

from .transcript import Segment


def srt(segments: Iterable[Segment]) -> str:
    cues = [
        f"{number}\n{_time(each.start_s, ',')} --> {_time(each.end_s, ',')}\n{_line(each.text)}\n\n"
        for number, each in enumerate(segments, 1)
    ]
    return "".join(cues)


def vtt(segments: Iterable[Segment]) -> str:
    cues = [
        f"{_time(each.start_s, '.')} --> {_time(each.end_s, '.')}\n{_escaped(_line(each.text))}\n\n"
        for each in segments
    ]
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, mark: str) -> str:
    """Return a time as HH:MM:SS and milliseconds, with `mark` between them."""
    rest, milliseconds = divmod(round(seconds * 1000), 1000)
    rest, whole = divmod(rest, 60)
    hours, minutes = divmod(rest, 60)
    return f"{hours:02}:{minutes:02}:{whole:02}{mark}{milliseconds:03}"


def _line(text: str) -> str:
    """Return a text as one line in which each arrow «-->» is «-- >»: an empty line or an arrow would end the cue."""
    return " ".join(text.split()).replace("-->", "-- >")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
