"""Forms are split into the parts that other implementations put into them, and malformed ones are refused."""

from __future__ import annotations

import time

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.server.bodies.body_error import BodyError
from tokenloom.frontend.server.bodies.form_data import MAX_HEAD_BYTES, MAX_PARTS, boundary_of, form_parts

HEAD = 'Content-Disposition: form-data; name="{}"'
FILE = 'Content-Disposition: form-data; name="file"; filename={}'

NAMES = st.text(st.characters(categories=["L", "N"], include_characters='_[]-"\\ ;='), min_size=1, max_size=12)
CONTENTS = st.binary(max_size=60) | st.text("\r\n-b", max_size=40).map(str.encode)


def form(*parts: tuple[str, bytes], boundary: str = "bb", end: str = "--") -> bytes:
    """Write a form of (header lines, content)."""
    written = (f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts)
    return b"".join(written) + f"--{boundary}{end}\r\n".encode()


def read(body: bytes, boundary: str = "bb") -> list[tuple[str, bytes, bool]]:
    return [(part.name, bytes(part.content), part.is_file) for part in form_parts(body, boundary)]


@given(st.lists(st.tuples(NAMES, CONTENTS, st.booleans()), max_size=6))
def test_the_parts_that_an_http_client_sends_come_back(parts: list[tuple[str, bytes, bool]]) -> None:
    sent = [(name, ("a.wav" if is_file else None, content)) for name, content, is_file in parts]
    files = [*sent, ("last", (None, b"x"))]  # a client sends no form without parts
    request = httpx2.Request("POST", "http://a", files=files)
    boundary = boundary_of(request.headers["content-type"])
    expected = [(name.replace('"', "%22"), content, is_file) for name, content, is_file in parts]  # as browsers do
    assert read(request.read(), boundary) == [*expected, ("last", b"x", False)]


@pytest.mark.parametrize(
    ("header", "boundary"),
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('multipart/form-data; charset=utf-8; BOUNDARY="a b(c)=?"', "a b(c)=?"),
        ("multipart/form-data;boundary=----x1; charset=utf-8", "----x1"),
    ],
)
def test_a_boundary_may_be_quoted_and_stand_among_other_parameters(header: str, boundary: str) -> None:
    assert boundary_of(header) == boundary


@pytest.mark.parametrize(
    "parameter", ["", "; boundary=", '; boundary=""', f"; boundary={'a' * 71}", '; boundary="a\tb"']
)
def test_a_content_type_without_a_valid_boundary_is_refused(parameter: str) -> None:
    with pytest.raises(BodyError, match="names no boundary of 1 to 70 characters"):
        boundary_of("multipart/form-data" + parameter)


@pytest.mark.parametrize("filename", ['"../../etc/passwd"', '"C:\\\\a.wav"', '""', "a.wav", '"a;name=b"', '"é\\".wav"'])
def test_a_filename_makes_a_file_and_has_no_other_effect(filename: str) -> None:
    assert read(form((FILE.format(filename), b"RIFF"))) == [("file", b"RIFF", True)]
    assert read(form((HEAD.format("file") + "; filename*=UTF-8''%2e%2e", b"RIFF"))) == [("file", b"RIFF", True)]


def test_text_around_the_form_blanks_behind_boundaries_and_empty_contents_are_no_fault() -> None:
    body = b"before\r\n" + form((HEAD.format("a"), b""), (HEAD.format("b"), b"\r\n--b")).replace(
        b"--bb\r", b"--bb \t\r"
    )
    assert read(body + b"behind --bb") == [("a", b"", False), ("b", b"\r\n--b", False)]
    assert read(b"--bb\r\nContent-Disposition: form-data; name=a\r\n\r\n--bb--") == [("a", b"", False)]


@pytest.mark.parametrize("num_bytes", [0, 1, 5, 30, 60, 77, -3, -5, -9, -20])
def test_a_form_that_is_cut_off_is_refused(num_bytes: int) -> None:
    body = form((HEAD.format("language"), b"en"), (FILE.format("a"), b"RIFF"))[:num_bytes]
    with pytest.raises(BodyError, match=r"ends in the midst|does not contain its boundary"):
        form_parts(body, "bb")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (form((HEAD.format("a"), b"x"), boundary="other"), "does not contain its boundary"),
        (form(("Content-Type: text/plain", b"x")), "part 1 of the form has no header `Content-Disposition"),
        (form(("Content-Disposition: attachment; name=a", b"x")), "part 1 of the form has no header"),
        (form(("Content-Disposition: form-data", b"x")), "part 1 of the form has no header"),
        (form((HEAD.format("a") + "; name=b", b"x")), "part 1 of the form has no header"),
        (form((HEAD.format("a") + '; x="y', b"x")), "part 1 of the form has no header"),
        (form((HEAD.format("a"), b"x\r\n--bbbb")), "the boundary is followed by other text"),
        (
            form((HEAD.format("a") + "\r\nContent-Transfer-Encoding: base64", b"eA==")),
            "content-transfer-encoding base64",
        ),
        (form((HEAD.format("a" * MAX_HEAD_BYTES), b"x" * MAX_HEAD_BYTES)), f"over {MAX_HEAD_BYTES} bytes of headers"),
        (form(*[(HEAD.format("a"), b"")] * (MAX_PARTS + 1)), f"over {MAX_PARTS} parts"),
        (form((HEAD.format("a"), b"x")).replace(b'"a"', b'"\xff"'), "headers that are not UTF-8"),
    ],
)
def test_malformed_forms_are_refused_with_a_mend(body: bytes, complaint: str) -> None:
    with pytest.raises(BodyError, match=complaint):
        form_parts(body, "bb")


@pytest.mark.parametrize("content", [b"\r", b"\r\n", b"\r\n--b", b"-", b"\0"])
def test_no_content_makes_a_form_slow_or_is_copied(content: bytes) -> None:
    body = form((FILE.format("a"), content * (8_000_000 // len(content))))
    begun = time.process_time()
    (part,) = form_parts(body, "bb")
    assert part.content.obj is body and time.process_time() - begun < 1.0
