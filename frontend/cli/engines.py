"""Choice of the engine for a command: at the address that it names, one of this user that runs, or one of its own.

An engine of this machine is used over its socket even if the address is that of its HTTP server.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from ...ipc.errors import ConfigError
from ..checkpoint.downloads.hub_name import parse_hub_name
from ..launcher.engine_record import EngineRecord

SCHEMES = ("ipc://", "tcp://", "http://", "https://")
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")


class Terminal(Protocol):
    """Where a person chooses. `ask` shows a text and reads a line."""

    is_person: bool

    def ask(self, text: str) -> str: ...


class StandardTerminal:
    """Standard input and error of this process."""

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty() and sys.stderr.isatty()

    def ask(self, text: str) -> str:
        print(text, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()


def is_address(word: str) -> bool:
    """Whether a word is the address of an engine: that of a model's page at the hub is none."""
    return word.startswith(SCHEMES) and parse_hub_name(word) is None


def check_address(word: str) -> str:
    """Return an address; ConfigError if it is none."""
    if not is_address(word):
        raise ConfigError(f"{word} is not an engine's address: it must begin with {', '.join(SCHEMES)}")
    return word


def engine_at(address: str, engines: Sequence[EngineRecord]) -> EngineRecord | None:
    """Return the engine of this user that serves at `address`; None: it is another's, or none is there."""
    parts = urlsplit(address)
    for engine in engines:
        if address in engine.addresses:
            return engine
        place = urlsplit(engine.http_address or "")
        if place.scheme != parts.scheme or not place.port or place.port != _port(parts.scheme, parts.port):
            continue
        if parts.hostname == place.hostname or {parts.hostname, place.hostname} <= {*_THIS_MACHINE}:
            return engine
    return None


def engine_of(model: str, engines: Sequence[EngineRecord]) -> EngineRecord | None:
    """Return the engine of this user that serves `model`, by the name in requests or as an operator gives it; None if
    there is none. Private engines do not count."""
    path = os.path.realpath(model) if os.path.exists(model) else None
    name = parse_hub_name(model)
    for engine in engines:
        given = engine.given_model or "demo"
        is_meant = model in (engine.model, given) or os.path.realpath(given) == path
        if not engine.is_private and (is_meant or (name is not None and parse_hub_name(given) == name)):
            return engine
    return None


def engine_meant(model: str | None, engines: Sequence[EngineRecord], terminal: Terminal) -> EngineRecord | None:
    """Return the engine that serves `model`, or, without one, that of `choose`; None if there is none."""
    return choose(engines, terminal) if model is None else engine_of(model, engines)


def choose(engines: Sequence[EngineRecord], terminal: Terminal) -> EngineRecord | None:
    """Return the one engine that a command without an address means, or None if none runs. Private engines do not
    count. Of several a person chooses; ConfigError with the list if there is none to ask."""
    public = [engine for engine in engines if not engine.is_private]
    if len(public) < 2:
        return public[0] if public else None
    shown = "\n".join(f"  {number}  {line}" for number, line in enumerate(list_engines(public), start=1))
    if not terminal.is_person:
        one_line = "; ".join(" ".join(line.split()) for line in list_engines(public))
        raise ConfigError(f"{len(public)} engines run, give the address of one: {one_line}")
    while True:
        answer = terminal.ask(f"{len(public)} engines run:\n{shown}\nwhich one (1 to {len(public)})? ")
        if not answer:
            raise ConfigError("none was chosen")
        if answer.strip().isdecimal() and 1 <= int(answer) <= len(public):
            return public[int(answer) - 1]


class ClientPlaces(NamedTuple):
    """Where a client reaches an engine: the addresses of its frontends, and the file with its keys."""

    addresses: list[str]
    key_file: str | None


def client_places(
    address: str | None, key_file: str | None, engines: Sequence[EngineRecord], terminal: Terminal
) -> ClientPlaces:
    """Return where a client reaches the engine at `address`, or, without one, that of `choose`. `key_file`: goes before
    the engine's own. ConfigError if none runs, or if the address is that of a server which a client cannot reach."""
    if address is None:
        engine = choose(engines, terminal)
        if engine is None:
            raise ConfigError("no engine of this user runs: engine-launch serve MODEL starts one")
    else:
        engine = engine_at(check_address(address), engines)
    if engine is not None:
        return ClientPlaces(engine.addresses, key_file or engine.key_file)
    assert address is not None
    if address.startswith("http"):
        raise ConfigError(f"no engine of this user serves at {address}: give its ipc:// or tcp:// address (--listen)")
    return ClientPlaces([address], key_file)


def list_engines(engines: Sequence[EngineRecord]) -> list[str]:
    """Format a line for each engine: model, address, process, age."""
    width = max((len(engine.model) for engine in engines), default=0)
    now = time.time()
    return [
        f"{engine.model:{width}}  {engine.http_address or engine.addresses[0]}  pid {engine.pid}  "
        f"{age(now - engine.started_at)}"
        for engine in engines
    ]


def age(seconds: float) -> str:
    """Format a duration by its largest unit: 5 s, 12 min, 3 h, 9 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


def url_of(engine: EngineRecord) -> str:
    """Return the URL of an engine's HTTP server on this machine; ConfigError if it has none."""
    address = engine.http_address or ""
    if not address.startswith("http"):
        raise ConfigError(
            f"the engine of {engine.model} (pid {engine.pid}) has no HTTP server at a port: start it by engine-launch "
            "serve, or with --http"
        )
    parts = urlsplit(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "", parts.netloc.rpartition(":")[0])
    return f"{parts.scheme}://{host}:{parts.port}"


def _port(scheme: str, port: int | None) -> int | None:
    return port or {"http": 80, "https": 443}.get(scheme)
