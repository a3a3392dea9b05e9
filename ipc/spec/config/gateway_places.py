"""Checks of the options of gateways, and of the engines behind them."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from ...errors import ConfigError
from ...sockets.endpoints import check_ports, split_tcp
from .comma_list import comma_list

_KEYS = "--hosts-key-file: make it with `engine-launch keygen FILE` and copy it to each engine and gateway"


class GatewayOptions(NamedTuple):
    """The options of EngineConfig about gateways."""

    core_listen: str | None
    cores: str | None
    hosts_key_file: str | None
    num_replicas: int
    is_insecure: bool


def check_gateway(options: GatewayOptions) -> None:
    """Raise ConfigError if the options for gateways are invalid: an engine's cores must listen at one interface, with
    keys and fixed ports; a gateway needs keys and valid addresses of cores, and starts no replicas."""
    listen, cores = options.core_listen, options.cores
    if listen is None and cores is None:
        return
    name = f"--core-listen {listen}" if cores is None else f"--cores {cores}"
    if listen is not None and cores is not None:
        raise ConfigError(f"--core-listen {listen} is for engines and --cores for gateways: leave one of them out")
    if options.hosts_key_file is None:
        raise ConfigError(f"{name} needs {_KEYS}")
    if cores is not None:
        if options.num_replicas > 1:
            raise ConfigError(f"{name}: a gateway starts no replicas: leave out --data-parallel-size")
        core_addresses(cores)
        return
    assert listen is not None
    host, port = _split(name, listen)
    if port == 0:
        raise ConfigError(f"{name} needs a port that stays the same, since gateways come back to it")
    check_ports("--core-listen", listen, options.num_replicas, "replicas")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{name} must be tcp://IP:PORT with an address of this host") from None
    if address.is_unspecified and not options.is_insecure:
        raise ConfigError(
            f"{name} is all interfaces: give the address of the one that connects the gateways, or --insecure"
        )


def core_addresses(cores: str) -> list[str]:
    """Parse --cores into tcp://HOST:PORT addresses; ConfigError if one is malformed or given twice, or there is
    none."""
    addresses = comma_list(cores)
    for address in addresses:
        _split(f"--cores {address}", address)
    if not addresses or len({*addresses}) < len(addresses):
        raise ConfigError(f"--cores {cores} must name each core once, as tcp://HOST:PORT with commas between")
    return addresses


def _split(name: str, address: str) -> tuple[str, int]:
    try:
        return split_tcp(address)
    except ValueError:
        raise ConfigError(f"{name} must be tcp://HOST:PORT") from None
