"""Answers to pieces are joined in their order, however they come; subtitles have their segments with rounded times."""

from __future__ import annotations

import itertools
import random
import re
import zlib
from array import array
from fractions import Fraction
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.speech.languages import LANGUAGES
from tokenloom.frontend.forms.speech.prompts import PlainReader
from tokenloom.frontend.forms.speech.qwen3_asr import HeadReader
from tokenloom.frontend.forms.speech.subtitles import srt, vtt
from tokenloom.frontend.forms.speech.transcript import Segment, Transcript, joint
from tokenloom.frontend.forms.speech.whisper import TimedReader as WhisperReader
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import Delta, Logprobs

EOS = 2


class Piece(NamedTuple):
    start_s: float
    end_s: float


def delta(*tokens: tuple[int, str, float], finish_reason: FinishReason | None = None) -> Delta:
    """Return a delta of tokens (id, text, logprob)."""
    ids, texts, values = zip(*tokens, strict=True) if tokens else ((), (), ())
    logprobs = Logprobs(
        num_top=0,
        token_ids=encode_ids(ids),
        logprobs=array("f", values).tobytes(),
        ranks=encode_ids([1] * len(ids)),
        texts=dict(zip(ids, texts, strict=True)),
    )
    text = "".join(text for token_id, text, _ in tokens if token_id != EOS)
    return Delta(request_id="r", token_ids=encode_ids(ids), text=text, logprobs=logprobs, finish_reason=finish_reason)


def pieces(count: int, seconds: float = 10.0) -> list[Piece]:
    return [Piece(place * seconds, (place + 1) * seconds) for place in range(count)]


TEXTS = st.lists(st.text("ab ,\n", max_size=8), min_size=1, max_size=5)


@given(TEXTS, st.integers(0, 1 << 16))
def test_text_is_given_out_in_order_and_once_whatever_the_order_of_answers(texts: list[str], seed: int) -> None:
    transcript, rng = Transcript(pieces(len(texts)), PlainReader), random.Random(seed)
    coming = {place: [*text] for place, text in enumerate(texts)}
    given, expected = "", " ".join(text.strip() for text in texts if text.strip())
    while coming:
        place = rng.choice(sorted(coming))
        letters = [coming[place].pop(0) for _ in range(min(rng.randrange(3), len(coming[place])))]
        is_last = not coming[place]
        transcript.add(place, Delta(request_id="r", text="".join(letters), finish_reason="stop" if is_last else None))
        if is_last:
            del coming[place]
        if rng.random() < 0.7:
            given += transcript.take()[0]
            assert expected.startswith(given)
    given += transcript.take()[0]
    assert given == transcript.text == expected
    assert [each.text for each in transcript.segments()] == [text.strip() for text in texts if text.strip()]


def test_the_text_of_the_first_unfinished_piece_does_not_wait_for_its_end_and_that_of_later_ones_does() -> None:
    transcript = Transcript(pieces(2), PlainReader)
    transcript.add(1, Delta(request_id="r", text="second", finish_reason="stop"))
    assert transcript.take() == ("", [])
    transcript.add(0, Delta(request_id="r", text=" first, "))
    assert transcript.take()[0] == "first,"
    transcript.add(0, Delta(request_id="r", text="still first. ", finish_reason="stop"))
    assert transcript.take()[0] == " still first. second"


@pytest.mark.parametrize(
    ("before", "text", "between"),
    [
        ("", "a", ""),
        (".", "B", " "),
        ("。", "今", ""),
        ("い", "O", ""),
        ("k", "漢", ""),
        ("ไ", "ท", ""),
        ("다", "한", " "),
    ],
)
def test_pieces_are_joined_by_a_blank_except_in_scripts_without_blanks(before: str, text: str, between: str) -> None:
    assert joint(before, text) == between


def test_segments_have_the_tokens_of_their_text_and_whispers_numbers() -> None:
    transcript = Transcript(pieces(2, 12.5), HeadReader, [EOS])
    head = [(7, "language", -9.0), (8, " Dutch", -9.0), (9, "<asr_text>", -9.0)]
    transcript.add(0, delta(*head, (11, "aan", -0.5)))
    transcript.add(0, delta((12, " aan" * 20, -1.5), (EOS, "</s>", -9.0), finish_reason="stop"))
    transcript.add(1, delta(*head, (EOS, "</s>", -9.0), finish_reason="stop"))  # silence
    text, tokens = transcript.take()
    assert [token.token_id for token in tokens] == [11, 12] and text == "aan" + " aan" * 20
    (segment,) = transcript.segments()
    assert (segment.start_s, segment.end_s, segment.text) == (0.0, 12.5, text)
    assert [token.token_id for token in segment.tokens] == [11, 12] and segment.mean_logprob == -1.0
    assert segment.compression_ratio == len(text) / len(zlib.compress(text.encode())) > 2.4
    assert transcript.language == LANGUAGES["nl"] and transcript.duration_s == 25.0


def test_the_language_is_that_of_the_longest_time() -> None:
    transcript = Transcript([Piece(0, 10), Piece(10, 15), Piece(15, 24)], HeadReader)
    for place, name in enumerate(("German", "Dutch", "Dutch")):
        transcript.add(place, Delta(request_id="r", text=f"language {name}<asr_text>ja", finish_reason="stop"))
    assert transcript.language == LANGUAGES["nl"]


@pytest.mark.parametrize("ends", [(23,), (12, 23), (11, 13, 23), (5, 23)])
def test_segments_have_their_tokens_also_if_characters_have_several(ends: tuple[int, ...]) -> None:
    """Each character has three tokens, which alone are no characters. `ends`: tokens before the end of deltas."""
    times = [(100 + number, f"<|{number}.00|>", -9.0) for number in range(4)]
    one, two = ([(1000 + 30 * part + number, "\ufffd", -1.0) for number in range(9)] for part in range(2))
    tokens = [times[0], *one, times[1], times[2], *two, times[3], (EOS, "</s>", -9.0)]
    shown, length = "<|0.00|>漢字仮<|1.00|><|2.00|>名交文<|3.00|>", {5: 9, 11: 19, 12: 27, 13: 27, 23: 38}
    transcript = Transcript(pieces(1), WhisperReader, [EOS])
    for begin, end in itertools.pairwise((0, *ends)):
        part = delta(*tokens[begin:end], finish_reason="stop" if end == len(tokens) else None)
        transcript.add(0, msgspec.structs.replace(part, text=shown[length.get(begin, 0) : length[end]]))
    found = [(each.text, each.start_s, each.end_s, [t.token_id for t in each.tokens]) for each in transcript.segments()]
    ids = [[token_id for token_id, *_ in each] for each in (one, two)]
    assert found == [("漢字仮", 0.0, 1.0, ids[0]), ("名交文", 2.0, 3.0, ids[1])]


# ── subtitles ────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_rounded(milliseconds: int, seconds: float) -> bool:
    return abs(Fraction(milliseconds, 1000) - Fraction(seconds)) <= Fraction(1, 2000) + Fraction(1, 10**9)


@given(st.lists(st.floats(0, 400_000), min_size=2, max_size=2).map(sorted))
def test_times_are_rounded_to_milliseconds_and_carry_to_hours(times: list[float]) -> None:
    start, end = times
    found = re.fullmatch(
        r"1\n(\d{2,}):([0-5]\d):([0-5]\d),(\d{3}) --> (\d{2,}):([0-5]\d):([0-5]\d),(\d{3})\na\n\n",
        srt([Segment(start, end, "a", ())]),
    )
    assert found is not None
    numbers = [*map(int, found.groups())]
    for (hours, minutes, seconds, milliseconds), time in ((numbers[:4], start), (numbers[4:], end)):
        assert is_rounded(3_600_000 * hours + 60_000 * minutes + 1000 * seconds + milliseconds, time)


def test_subtitles_have_the_published_forms() -> None:
    segments = [Segment(0.0, 59.9996, "Hello\n\nthere --> you", ()), Segment(3599.9995, 360_000.25, "a < b & c", ())]
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:01:00,000\nHello there -- > you\n\n2\n01:00:00,000 --> 100:00:00,250\na < b & c\n\n"
    )
    assert vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:01:00.000\nHello there -- &gt; you\n\n"
        "01:00:00.000 --> 100:00:00.250\na &lt; b &amp; c\n\n"
    )
    assert srt([Segment(0.0, 1.0, "a ----> b -->-->", ())]).endswith("\na ---- > b -- >-- >\n\n")
    assert srt([]) == "" and vtt([]) == "WEBVTT\n\n"
