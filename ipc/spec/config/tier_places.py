"""Addresses of --kv-remote, --kv-peers, --kv-listen and --kv-events, and which of them need a secret.

Blocks that cross a network are trusted only with a MAC, and other engines only with a key: both come from
--kv-key-file. A loopback address and a socket file need no key file.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from ...errors import ConfigError
from .comma_list import comma_list

TIER_OPTIONS = ("kv_host_bytes", "kv_disk", "kv_remote", "kv_peers", "kv_listen")
REMOTE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")


def check_places(remote: str | None, peers: str | None, listen: str | None, has_key: bool) -> None:
    """Raise ConfigError if an address is invalid, or is on a network and there is no key file."""
    hosts = []
    if remote is not None:
        hosts.append(("--kv-remote", *_remote_host(remote)))
    hosts += [("--kv-peers", address, _peer_host("--kv-peers", address)) for address in peer_addresses(peers)]
    if listen is not None:
        hosts.append(("--kv-listen", listen, _peer_host("--kv-listen", listen)))
    for option, address, host in hosts:
        if host is not None and not _is_loopback(host) and not has_key:
            raise ConfigError(
                f"{option} {address} needs --kv-key-file: anyone on its network could read or replace blocks"
            )


def check_events(address: str, *, has_key: bool, is_insecure: bool) -> None:
    """Raise ConfigError if --kv-events is invalid, or is on a network with neither a key nor --insecure."""
    host = _peer_host("--kv-events", address)
    if host is not None and not 0 < int(address.rpartition(":")[2]) < 65535:
        raise ConfigError(f"--kv-events {address} must have a port in [1, 65534]: the next one repeats missed events")
    if host is not None and not _is_loopback(host) and not has_key and not is_insecure:
        raise ConfigError(
            f"--kv-events {address} would tell anyone the tokens of all prompts: give --key-file (made by "
            "`engine-launch keygen FILE`) or --insecure"
        )


def check_replica_ports(num_replicas: int, listen: str | None, events: str | None) -> None:
    """Raise ConfigError if a replica's ports of --kv-listen or --kv-events would be above 65535."""
    ports = {"--kv-listen": (listen, num_replicas - 1), "--kv-events": (events, 2 * num_replicas - 1)}
    for option, (address, num_more) in ports.items():
        if address is not None and address.startswith("tcp://") and (port := _port(address)) + num_more > 65535:
            raise ConfigError(
                f"{option} {address}: {num_replicas} replicas take the ports {port} to {port + num_more}: give a lower "
                "one"
            )


def listen_address_of(address: str, replica: int) -> str:
    """Return a replica's address for --kv-listen: replica N adds N to a tcp port (0 stays: any free port), and
    -replica-N to a path."""
    return _moved(address, replica, replica if address.startswith("tcp://") and _port(address) else 0)


def events_address_of(address: str, replica: int) -> str:
    """Return a replica's address for --kv-events: replica N adds 2 · N to a tcp port, and -replica-N to a path."""
    return _moved(address, replica, 2 * replica)


def _moved(address: str, replica: int, num_ports: int) -> str:
    if address.startswith("ipc://"):
        return f"{address}-replica-{replica}" if replica else address
    return f"{address.rpartition(':')[0]}:{_port(address) + num_ports}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def replay_address(address: str) -> str:
    """Return the address at which subscribers request missed events of the --kv-events address."""
    if address.startswith("ipc://"):
        return f"{address}-replay"
    before, _, port = address.rpartition(":")
    return f"{before}:{int(port) + 1}"


def peer_addresses(peers: str | None) -> list[str]:
    """Return the addresses of --kv-peers."""
    return comma_list(peers)


def _remote_host(url: str) -> tuple[str, str | None]:
    """Return the URL of --kv-remote without its password, and its host, None for a socket file. ConfigError if it is
    invalid."""
    scheme, separator, rest = url.partition("://")
    shown = f"{scheme}{separator}{rest.rpartition('@')[2]}"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # a port that is no number raises
    except ValueError:  # its text may show a part of the password
        raise ConfigError(
            f"--kv-remote {shown} has no valid host and port: write the password's special characters as %XX"
        ) from None
    if scheme not in REMOTE_SCHEMES or not (parts.path if scheme == "unix" else host):
        raise ConfigError(
            f"--kv-remote {shown} must be redis://, rediss://, valkey:// or valkeys:// with "
            "[USER:PASSWORD@]HOST:PORT/DB, or unix:///PATH?db=N"
        )
    return shown, None if scheme == "unix" else host


def _peer_host(option: str, address: str) -> str | None:
    """Return the host of an ipc or tcp address, None for a socket file. ConfigError if it is invalid."""
    if address.startswith("ipc:///"):
        return None
    match = re.fullmatch(r"tcp://(.+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"{option} {address} must be ipc:///PATH or tcp://HOST:PORT with a port in [0, 65535]")
    return match[1].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
