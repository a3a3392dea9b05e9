"""`engine-launch reload-frontend [ENGINE]`: replaces the frontends of a running engine, as after an upgrade."""

from __future__ import annotations

import argparse
import time

from ....ipc.errors import ConfigError
from ...client.client import Client
from ...launcher.engine_record import running_engines
from ..engines import StandardTerminal, client_places, engine_of, is_address

DESCRIPTION = (
    "Replace the frontends of a running engine one by one, as after an upgrade of their program. The next one loads "
    "while the old one serves, and goes on with its streams. Exit code 0: the new ones serve; 1: one has not come up, "
    "and the old one goes on."
)
EXAMPLES = ["", "http://127.0.0.1:8000", "tcp://10.0.0.7:5555 --key-file engine.key"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "an address as engine-launch prints it, or the model that it serves; none: the engine of this user that runs"
    parser.add_argument("engine", nargs="?", metavar="ENGINE", help=text)
    parser.add_argument("--key-file", metavar="FILE", help="the engine's --key-file")


def run(arguments: argparse.Namespace) -> int:
    engines = running_engines()
    address: str | None = arguments.engine
    if address is not None and not is_address(address):
        found = engine_of(address, engines)
        if found is None:
            raise ConfigError(f"no engine of this user serves {address}: engine-launch ps lists those that run")
        address = found.addresses[0]
    places, key_file = client_places(address, arguments.key_file, engines, StandardTerminal())
    begun = time.monotonic()
    with Client(places, key_file=key_file) as client:
        client.reload_frontends()
    print(f"all frontends were replaced, in {time.monotonic() - begun:.1f} s")
    return 0
