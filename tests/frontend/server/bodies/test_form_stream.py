"""A form that comes in pieces is read as `form_parts` reads it whole, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.server.bodies.body_error import BodyError
from tokenloom.frontend.server.bodies.form_data import MAX_HEAD_BYTES, PartHead, form_parts
from tokenloom.frontend.server.bodies.form_stream import FormStream

HEAD = b'Content-Disposition: form-data; name="a"'
TOKENS = (b"--bb", b"\r\n", b"--", b"\r", b"-", b"b", b"x", b" ", HEAD, b'; filename="f"', b"\r\n--bb", b"\r\n--bb--")
TEXTS = st.lists(st.sampled_from((*TOKENS, b"\r\n\r\n")), max_size=12).map(b"".join)
PARTS = st.tuples(st.booleans(), TEXTS).map(
    lambda part: b"--bb\r\n" + HEAD + (b'; filename="f"' if part[0] else b"") + b"\r\n\r\n" + part[1] + b"\r\n"
)
FORMS = st.tuples(st.lists(PARTS, max_size=4), TEXTS).map(lambda form: b"".join(form[0]) + b"--bb--" + form[1])
CUT_FORMS = st.tuples(FORMS, st.integers(0, 200)).map(lambda form: form[0][: form[1]])

Found = list[tuple[str, bytes, bool]]


def whole(body: bytes) -> Found | str:
    try:
        return [(part.name, bytes(part.content), part.is_file) for part in form_parts(body, "bb")]
    except BodyError as error:
        return str(error)


def in_pieces(pieces: Iterator[bytes]) -> Found | str:
    stream, found = FormStream("bb"), Found()
    try:
        for piece in pieces:
            for event in stream.feed(piece):
                if isinstance(event, PartHead):
                    found.append((event.name, b"", event.filename is not None))
                else:
                    name, content, is_file = found.pop()
                    found.append((name, content + event, is_file))
        stream.finish()
    except BodyError as error:
        return str(error)
    return found


@given(TEXTS | FORMS | CUT_FORMS, st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_cuts_change_nothing(body: bytes, sizes: list[int]) -> None:
    def pieces() -> Iterator[bytes]:
        place = 0
        while place < len(body):
            size = sizes[place % len(sizes)]
            yield body[place : place + size]
            place += size

    assert in_pieces(pieces()) == whole(body)


def test_a_large_content_passes_without_being_held() -> None:
    stream = FormStream("bb")
    list(stream.feed(b"--bb\r\n" + HEAD + b"\r\n\r\n"))
    for _ in range(100):
        (content,) = stream.feed(bytes(1 << 16))
        assert abs(len(content) - (1 << 16)) < 10
    assert b"".join(event for event in stream.feed(b"\r\n--bb--") if isinstance(event, bytes)) == bytes(5)
    stream.finish()


def test_a_head_without_an_end_is_refused_before_it_is_held_whole() -> None:
    stream = FormStream("bb")
    with pytest.raises(BodyError, match=f"over {MAX_HEAD_BYTES} bytes of headers"):
        for _ in range(2 * MAX_HEAD_BYTES // 64):
            list(stream.feed(b"--bb\r\n" + b"x" * 64))


@pytest.mark.parametrize(
    ("parameter", "name"),
    [
        ('filename="a b.jsonl"', "a b.jsonl"),
        ("filename=a.jsonl", "a.jsonl"),
        ("filename*=UTF-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("filename=\"n.jsonl\"; filename*=UTF-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ('filename="na\u00efve.jsonl"', "naïve.jsonl"),
        ("filename*=broken", ""),
    ],
)
def test_a_file_has_the_name_that_its_client_gives(parameter: str, name: str) -> None:
    head = f'--bb\r\nContent-Disposition: form-data; name="file"; {parameter}\r\n\r\n'.encode()
    assert list(FormStream("bb").feed(head)) == [PartHead("file", name)]
