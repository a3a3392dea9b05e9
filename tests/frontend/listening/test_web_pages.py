"""WebPages: names and origins that a browser sends for a page of ours, of an allowed site, and of others."""

from __future__ import annotations

import os

import pytest

from tokenloom.frontend.listening.web_pages import WebPages
from tokenloom.ipc.spec.config.engine_config import EngineConfig

MACHINE = os.uname().nodename
LOOPBACK = "127.0.0.1"
OURS = [
    *("localhost", "localhost:8000", "LocalHost:8000", "localhost.", "localhost.:8000", "app.localhost:80"),
    *("127.0.0.1", "127.0.0.1:8000", "127.1:8000", "[::1]", "[::1]:8000", "10.0.0.7:8000", "[fe80::1%25eth0]:80"),
    *(
        MACHINE,
        f"{MACHINE.upper()}:8000",
        f"{MACHINE}.local:8000",
        "host.docker.internal:8000",
        "",
        "0x7f.1",
        "engine:8000",
    ),
]
FOREIGN = [
    *("evil.example", "evil.example:8000", "127.0.0.1:8000.evil.example", "127.0.0.1.evil.example", "evil.example."),
    *("localhost:8000:evil.example", "localhost@evil.example", "evil.example/localhost", "1.2.3.4x", "localhost.."),
    *("[::1].evil.example", "evil.example#localhost", "localhost,evil.example", "localhost evil.example", ":8000"),
    *("internal.evil.example", "localhost.evil.example", "evil.local", "x.xinternal", "ev\xeel.example", "."),
]


def host_fault(pages: WebPages, host: str, address: str | None = LOOPBACK) -> str:
    return pages.host_fault([host.encode("latin-1")], address)


@pytest.mark.parametrize("host", OURS)
def test_names_and_addresses_of_this_machine_are_ours(host: str) -> None:
    assert host_fault(WebPages(), host) == ""
    assert host_fault(WebPages(hosts=["llm.example"]), host) == "", "further names take none away"


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_a_page_could_have_made_is_refused_on_the_loopback(host: str) -> None:
    for address in (LOOPBACK, "127.0.0.2", "::1", "::ffff:127.0.0.1"):
        fault = host_fault(WebPages(), host, address)
        assert "is no name of this server" in fault and "--allowed-hosts" in fault and "--api-key" in fault


def test_a_request_with_no_host_is_of_no_browser_and_one_with_two_is_refused() -> None:
    pages = WebPages()
    assert pages.host_fault([], LOOPBACK) == ""
    assert "2 Host headers" in pages.host_fault([b"localhost", b"localhost"], LOOPBACK)
    assert "2 Host headers" in pages.host_fault([b"localhost", b"evil.example"], None)


def test_any_name_goes_where_no_browser_of_this_machine_connects() -> None:
    pages = WebPages()
    for address in (None, "10.0.0.7", "2001:db8::7"):  # a unix socket; an address that proxies and containers use
        assert host_fault(pages, "llm.example", address) == ""


def test_allowed_hosts_bind_all_connections_of_tcp() -> None:
    pages = WebPages(hosts=["LLM.example"])
    for address in (LOOPBACK, "10.0.0.7"):
        assert host_fault(pages, "llm.example:8000", address) == host_fault(pages, "localhost", address) == ""
        assert host_fault(pages, "evil.example", address) and host_fault(pages, "x.llm.example", address)
    assert host_fault(pages, "evil.example", None) == ""
    assert host_fault(WebPages(hosts=["*"]), "evil.example") == ""
    assert host_fault(WebPages(listen_host="Engine.Example"), "engine.example:8000") == "", "that of --http"


HERE = {b"host": b"localhost:8000"}
CROSS = {b"sec-fetch-site": b"cross-site"}
LINK = {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        HERE,
        HERE | {b"origin": b"http://localhost:8000"},
        HERE | {b"origin": b"http://LOCALHOST:8000"},
        HERE | {b"origin": b"https://localhost:8000"},  # a proxy speaks TLS
        {b"host": b"localhost", b"origin": b"http://localhost"},
        {b"host": b"localhost:80", b"origin": b"http://localhost"},
        {b"host": b"localhost", b"origin": b"https://localhost:443"},
        {b"host": b"[::1]:8000", b"origin": b"http://[::1]:8000"},
        HERE | {b"sec-fetch-site": b"same-origin"},
        HERE | {b"sec-fetch-site": b"same-origin", b"origin": b"https://llm.example"},  # a proxy has replaced the Host
        HERE | {b"sec-fetch-site": b"none"} | LINK,
        HERE | CROSS | LINK,  # somebody follows a link to /v1/models: no page reads the answer
    ],
)
def test_our_own_pages_and_other_programs_may_call(headers: dict[bytes, bytes]) -> None:
    assert WebPages().origin_fault(headers) == ""


@pytest.mark.parametrize(
    "headers",
    [
        HERE | {b"origin": b"https://evil.example"},
        HERE | {b"origin": b"null"},
        HERE | {b"origin": b"http://localhost:3000"},
        HERE | {b"origin": b"http://127.0.0.1:8000"},
        HERE | {b"origin": b"http://localhost:8000.evil.example"},
        HERE | {b"origin": b"http://evil.example/http://localhost:8000"},
        HERE | {b"origin": b"chrome-extension://abc"},
        HERE | {b"origin": b"localhost:8000"},
        {b"origin": b"http://"},
        {b"host": b"", b"origin": b"https://evil.example"},
        HERE | {b"origin": b"http://localhost:8000"} | CROSS,
        HERE | CROSS,
        HERE | {b"sec-fetch-site": b"same-site"},
        HERE | CROSS | {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"iframe"},
        HERE | CROSS | {b"sec-fetch-mode": b"no-cors", b"sec-fetch-dest": b"image"},
        HERE | CROSS | LINK | {b"origin": b"https://evil.example"},  # a form that it posts
    ],
)
def test_pages_of_other_sites_may_not_call(headers: dict[bytes, bytes]) -> None:
    assert "may not call here: start with --cors-origins" in WebPages().origin_fault(headers)
    assert "may not call here" in WebPages(origins=["https://app.example"]).origin_fault(headers)


def test_listed_origins_may_call_and_an_allowed_host_is_an_origin_of_ours() -> None:
    pages = WebPages(origins=["https://app.example"], hosts=["llm.example"])
    assert pages.origin_fault(HERE | CROSS | {b"origin": b"https://app.example"}) == ""
    assert pages.origin_fault(HERE | {b"origin": b"http://llm.example:81"}) == "", "a proxy may replace the Host"
    assert pages.origin_fault(HERE | CROSS | {b"origin": b"http://evil.example"})
    assert WebPages(origins=["*"]).origin_fault(HERE | CROSS | {b"origin": b"null"}) == ""


def test_the_options_name_origins_hosts_and_the_name_to_listen_at() -> None:
    origins = "https://a.example, https://b.example"
    config = EngineConfig(http="engine.example:8000", cors_origins=origins, allowed_hosts="c.example,d.example")
    pages, own = WebPages.of(config), WebPages.of(config, has_others=False)
    assert host_fault(pages, "engine.example") == host_fault(pages, "d.example") == "" != host_fault(pages, "e.example")
    given = HERE | {b"origin": b"https://b.example"}
    assert pages.origin_fault(given) == "" != own.origin_fault(given)
