"""URLs of media are checked before anything is asked for, and shown without their secrets."""

from __future__ import annotations

import pytest

from tokenloom.frontend.server.sources.media_url import MAX_URL_LENGTH, AllowedDomains, parse_url
from tokenloom.ipc.errors import RequestError


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("http://a.example", "a.example", 80, "/"),
        ("HTTPS://A.Example./x/y.png?k=v%20w#part", "a.example", 443, "/x/y.png?k=v%20w"),
        ("https://bücher.example:8443/ü", "xn--bcher-kva.example", 8443, "/%C3%BC"),
        ("http://[2606:2800::1]:81/", "2606:2800::1", 81, "/"),
        ("http://a.example/a b", "a.example", 80, "/a%20b"),
    ],
)
def test_a_url_names_host_port_and_target(text: str, host: str, port: int, target: str) -> None:
    url = parse_url(text)
    assert (url.host, url.port, url.target) == (host, port, target)
    assert parse_url(url.text) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ftp://a.example/x", "begin with data:"),
        ("a.example/x", "begin with data:"),
        ("http:///x", "no valid host"),
        ("http://user:secret@a.example/", "holds a user name"),
        ("http://a.example:99999/", "not a valid URL"),
        ("http://[::1/", "not a valid URL"),
        ("http://a%2eexample/", "no valid host"),
        ("http://a.example/" + "x" * MAX_URL_LENGTH, "characters, at most 8192"),
        ("http://" + "ü" * 70 + ".example/", "not a valid URL"),
    ],
)
def test_an_invalid_url_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        parse_url(text)
    assert "secret" not in str(caught.value) and len(str(caught.value)) < 400


def test_no_line_break_reaches_the_request() -> None:
    url = parse_url("http://a.example/x\r\nHost: b\n?q=\r\nX: y")
    assert url.target.isprintable() and " " not in url.target


def test_errors_show_no_query() -> None:
    assert "token" not in str(parse_url("https://a.example/x?token=1"))


@pytest.mark.parametrize(
    ("rules", "host", "is_allowed"),
    [
        ([], "a.example", False),
        (["a.example"], "a.example", True),
        (["A.EXAMPLE."], "a.example", True),
        (["a.example"], "b.a.example", False),
        (["*.a.example"], "b.a.example", True),
        (["*.a.example"], "c.b.a.example", True),
        (["*.a.example"], "a.example", False),
        (["*.a.example"], "ba.example", False),
        (["a.example"], "a.example.evil", False),
        (["*"], "anything", True),
    ],
)
def test_a_host_must_be_named_by_the_operator(rules: list[str], host: str, is_allowed: bool) -> None:
    url = parse_url(f"https://{host}/x")
    if is_allowed:
        AllowedDomains(rules).check(url)
    else:
        with pytest.raises(RequestError, match="--allowed-media-domains"):
            AllowedDomains(rules).check(url)


def test_a_redirect_never_leaves_https() -> None:
    url = parse_url("https://a.example/x/y")
    assert url.follow("z").text == "https://a.example/x/z"
    assert url.follow("//b.example/q").host == "b.example"
    for location in ("http://a.example/", "file:///etc/passwd", "ftp://a.example/"):
        with pytest.raises(RequestError):
            url.follow(location)


LONG = ("a" * 64, "a." * 127 + "aa", "ü" * 64, "ü" * 5000, "a.." * 2000)


@pytest.mark.parametrize("host", ["a..b", ".a", "a b", "a,b", "a\x00b", "[::1%25lo]", *LONG])
def test_a_host_that_cannot_be_looked_up_is_refused_before_it_is(host: str) -> None:
    with pytest.raises(RequestError, match="valid"):
        parse_url(f"http://{host}/x")


@pytest.mark.parametrize("host", ["a_b.example", "xn--bcher-kva.example", "a" * 63, "1.2.3.4", "[2606:4700::1111]"])
def test_hosts_that_can_be_looked_up_are_taken(host: str) -> None:
    assert parse_url(f"http://{host}/x").host == host.strip("[]")


@pytest.mark.parametrize("location", ["http://[", "http://[x]/", "//[", "http://a..b/", "http://a:99999/"])
def test_a_redirect_to_no_url_is_an_error_of_the_request(location: str) -> None:
    with pytest.raises(RequestError, match="valid"):
        parse_url("http://a.example/x").follow(location)
