"""WebPages: detection of requests that a web page of another site may have caused a browser to send.

A browser lets every page send requests to this machine, and lets it read the answers if the page's own host name
resolves to this machine (DNS rebinding). With an API key such requests fail, since the browser does not know the key.
Without an API key, the decision is made by headers that a page cannot forge: Host, Origin and Sec-Fetch-Site. Other
programs do not send the last two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ...ipc.sockets.endpoints import http_endpoint
from ...ipc.spec.config.comma_list import comma_list
from ...ipc.spec.config.engine_config import EngineConfig
from .http_listeners import is_loopback

ANY = "*"
_AUTHORITY = re.compile(r"(\[[0-9a-z:.%]+\]|[^:/?#@\[\]\s]+?)\.?(?::(\d{0,5}))?")  # host without a last dot, and port
_UNOWNED = re.compile(  # hosts that cannot be registered as domains
    r"\[.*\]|(?:.*\.)?(?:\d+|0x[0-9a-f]*)"  # addresses, including forms that only browsers accept
    r"|[^.]+|.*\.(?:localhost|internal)"  # localhost, names of services and of containers' hosts
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class WebPages:
    """The pages that may send requests: those of this server, and those of the origins that the operator lists."""

    def __init__(self, origins: Sequence[str] = (), hosts: Sequence[str] = (), listen_host: str = "") -> None:
        """`origins`: those of other pages that may call. `hosts`: further names of this server; if there are none, a
        Host header on a connection from another machine may have any name, since a proxy may choose it. `listen_host`:
        host in --http, as the operator wrote it."""
        self._origins, self._hosts = frozenset(origins), frozenset(host.lower() for host in hosts)
        machine = os.uname().nodename.lower()
        self._names = {machine, f"{machine}.local", listen_host.lower(), *self._hosts}

    @classmethod
    def of(cls, config: EngineConfig, *, has_others: bool = True) -> WebPages:
        """Return the pages that the options allow; without `has_others`, only pages of this server."""
        origins = comma_list(config.cors_origins) if has_others else ()
        host = "" if config.http_address is None else http_endpoint(config.http_address)[0]
        return cls(origins, comma_list(config.allowed_hosts), host)

    def host_fault(self, hosts: Sequence[bytes], address: str | None) -> str:
        """Return why a request's Host headers are refused: they may have a name that a web page's owner controls; "" if
        they are accepted. `address`: our address of the TCP connection; None: a unix socket, which no browser
        reaches."""
        if len(hosts) > 1:
            return f"the request has {len(hosts)} Host headers: send one"
        given = hosts[0].decode("latin-1").strip().lower() if hosts else ""
        if not given or address is None or ANY in self._hosts or not (self._hosts or is_loopback(address)):
            return ""
        found = _AUTHORITY.fullmatch(given)
        if found is not None and (found[1] in self._names or _UNOWNED.fullmatch(found[1])):
            return ""
        return (
            f"the Host {given!r:.100} is no name of this server, and a web page could have made it one: ask for "
            "localhost, or start with --allowed-hosts and the name, or with --api-key"
        )

    def origin_fault(self, headers: Mapping[bytes, bytes]) -> str:
        """Return why a request is refused: it is from a page that may not call; "" if the page may, or no page sent
        it."""
        origin, site = (headers.get(name, b"").decode("latin-1").strip() for name in (b"origin", b"sec-fetch-site"))
        if site in ("same-origin", "none") or ANY in self._origins or origin in self._origins:
            return ""
        if not origin:
            is_link = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
            if not site or is_link:
                return ""
        elif not site and self._is_own(origin.lower(), headers.get(b"host", b"").decode("latin-1").strip().lower()):
            return ""
        return (
            f"web pages of {origin or 'other sites'!r:.100} may not call here: start with --cors-origins and their "
            "origin, or with --api-key"
        )

    def _is_own(self, origin: str, host: str) -> bool:
        """Return whether an origin is that of this server's pages: it equals the request's Host, or is an allowed name,
        since a proxy may have replaced the Host."""
        scheme, _, authority = origin.partition("://")
        ours, theirs = _AUTHORITY.fullmatch(host), _AUTHORITY.fullmatch(authority)
        if theirs is None or (port := _DEFAULT_PORTS.get(scheme)) is None:
            return False
        is_same = ours is not None and (ours[1], ours[2] or port) == (theirs[1], theirs[2] or port)
        return is_same or theirs[1] in self._hosts
