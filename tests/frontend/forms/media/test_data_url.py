"""A data: URL has the content that browsers give it: https://fetch.spec.whatwg.org/#data-urls."""

from __future__ import annotations

import base64
import textwrap
from urllib.parse import quote

import pytest

from tokenloom.frontend.forms.media.data_url import decode_base64, decode_data_url, is_data_url, least_bytes
from tokenloom.frontend.forms.media.given_media import GivenMedia
from tokenloom.frontend.forms.media.held_medium import HeldMedium
from tokenloom.ipc.errors import RequestError

DATA = bytes(range(256)) + b"\xfb\xff\xfe?"
BASE64 = base64.b64encode(DATA).decode()
LINES = "\r\n".join(textwrap.wrap(BASE64, 76))


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/png;BASE64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/png;name=a.png;base64,{BASE64}",
        f"data:image/png;charset=utf-8; Base64 ,{BASE64}",
        f"data:image/png;base64,{quote(BASE64)}",
        f"data:image/png;base64,{quote(BASE64, safe='')}",
        f"data:image/png;base64,{LINES}",
        f"data:image/png;base64, {BASE64}\n",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode().rstrip('=')}",
        f"data:image/png;base64,{BASE64}#page=1",
        f"data:image/png,{quote(DATA)}",
        f"data:,{quote(DATA, safe='')}#fragment",
    ],
)
def test_every_form_that_browsers_read_has_its_content(url: str) -> None:
    assert is_data_url(url) and decode_data_url(url) == DATA
    for given in (url, f" \n{url}\t"):
        part = GivenMedia()
        part.add_part("content[0]", {"type": "image_url", "image_url": {"url": given}})
        (medium,) = part.media
        assert isinstance(medium, HeldMedium) and medium.data == DATA


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        (f"data:image/png;base64,{BASE64[:8]}=A", "is not base64"),
        (f"data:image/png;base64,{BASE64[:5]}", "is not base64"),
        ("data:image/png;base64,%zz", "is not base64"),
        ("data:image/png;base64,äöü", "is not base64"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,#AAAA", "is empty"),
    ],
)
def test_what_no_browser_reads_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        decode_data_url(url)


def test_a_type_that_is_named_base64_is_no_coding() -> None:
    assert decode_data_url("data:base64,QUJD") == b"QUJD"


@pytest.mark.parametrize("content", [BASE64, LINES, quote(BASE64, safe=""), BASE64.rstrip("=")])
def test_the_least_number_of_bytes_is_never_more_than_there_are(content: str) -> None:
    for repeats in (1, 40):
        data = decode_base64(BASE64, "") * repeats
        parts = base64.b64encode(data).decode()
        url = "data:image/png;base64," + (quote(parts, safe="") if "%" in content else parts)
        assert least_bytes(url) <= len(data)
    assert least_bytes(f"data:image/png;base64,{content}") <= len(DATA)
    assert least_bytes(f"data:image/png;base64,{BASE64 * 40}") > 0.9 * 40 * len(DATA)
