"""MediaUrl: an http(s) URL of a medium, checked against the domains that the operator allows."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from ....ipc.errors import RequestError

MAX_URL_LENGTH = 8192
MAX_HOST_LENGTH = 253  # in characters (RFC 1035)
MAX_SHOWN = 160  # characters of a URL in an error
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
_SAFE = "%/:=&?~#+!$,;'@()*[]"  # characters that stay as the caller has written them


class MediaUrl(NamedTuple):
    """Host to connect to, and path to request. The host is ASCII, in lower case and without brackets."""

    is_https: bool
    host: str
    port: int
    target: str  # path and query, as they are in the request line

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_https else "http"] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        return f"{'https' if self.is_https else 'http'}://{self.host_header}{self.target}"

    def __str__(self) -> str:
        """Return the URL without its query, which may hold a secret."""
        return shown(self.text)

    def follow(self, location: str) -> MediaUrl:
        """Return the URL to which a redirect leads. RequestError if it is invalid, or if it leads from https to
        http."""
        try:
            joined = urljoin(self.text, location)
        except ValueError as error:
            raise RequestError(f"{self} redirects to no valid URL: {error}") from None
        target = parse_url(joined)
        if self.is_https and not target.is_https:
            raise RequestError(f"{self} redirects from https to {target}: give an https URL that does not")
        return target


class AllowedDomains:
    """The hosts that URLs may name: exact names, *.NAME for all hosts below a name, or * for all hosts."""

    def __init__(self, rules: Iterable[str]) -> None:
        self._rules = [rule.strip().lower().rstrip(".") for rule in rules if rule.strip()]

    def check(self, url: MediaUrl) -> None:
        """Raise RequestError unless the URL's host is allowed."""
        if not self._rules:
            raise RequestError(
                f"{url}: this engine fetches no URLs: send the file itself as a data: URL, or start the engine with "
                "--allowed-media-domains"
            )
        if not any(self._matches(rule, url.host) for rule in self._rules):
            raise RequestError(
                f"{url}: the host {url.host} is not among the {len(self._rules)} of --allowed-media-domains: send the "
                "file itself as a data: URL"
            )

    @staticmethod
    def _matches(rule: str, host: str) -> bool:
        return rule in ("*", host) or (rule.startswith("*.") and host.endswith(rule[1:]))


def shown(url: str) -> str:
    """Return a URL for an error message: without its query, and shortened."""
    text = url.partition("?")[0].partition("#")[0]
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _host(given: str) -> str:
    """Return a host in ASCII; "" unless it is an address or a name that can be looked up. ValueError if IDNA cannot
    encode it or the address is invalid."""
    if ":" in given:
        return given if "%" not in given and ipaddress.ip_address(given) else ""
    host = given.removesuffix(".")
    if len(host) > MAX_HOST_LENGTH:
        return ""
    host = host if host.isascii() else host.encode("idna").decode()
    return host if _NAME.fullmatch(host) and len(host) <= MAX_HOST_LENGTH else ""


def parse_url(url: str) -> MediaUrl:
    """Return the MediaUrl for an http(s) URL. RequestError if it is invalid, too long, or contains a user name or
    password."""
    if len(url) > MAX_URL_LENGTH:
        raise RequestError(f"a URL has {len(url)} characters, at most {MAX_URL_LENGTH} are read: use a shorter one")
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
        host = _host(parts.hostname or "")
    except ValueError as error:
        raise RequestError(f"{shown(url)} is not a valid URL: {error}") from None
    if parts.scheme not in _PORTS:
        raise RequestError(f"{shown(url)}: URLs of media begin with data:, http:, https: or file:")
    if not host:
        raise RequestError(f"{shown(url)} has no valid host: write https://host/path")
    if parts.username is not None or parts.password is not None:
        raise RequestError(f"the URL at {host} holds a user name: leave it out")
    target = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
    return MediaUrl(parts.scheme == "https", host.lower(), port, target)
