"""Endpoints: the addresses of the sockets between an engine's processes, and to its clients.

Every process takes them from the EngineSpec; no other module composes an address. An intake process has none: it
inherits its socket.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from ..errors import ConfigError

DEFAULT_PORT = 8000  # of the HTTP server, if only its host is given


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses, ipc:// or tcp://; the comment of each names first the process that binds it.

    `{}` in an address stands for the number of a replaceable process, so that its successor binds a new one.
    """

    clients: str  # frontend, for clients
    control: str  # supervisor, for its children
    core: str  # core, for frontends
    steps: str  # core, for the workers of generation {}: SchedulerOutput
    results: str  # core, for the workers of generation {}: ModelRunnerOutput
    tier: str  # tier process number {}, for the core
    blobs: str = ""  # supervisor, for ranks on other hosts
    agents: str = ""  # supervisor, for agents of other hosts

    @classmethod
    def in_folder(cls, folder: str | Path, clients: str | None = None) -> Endpoints:
        """Return ipc addresses in a run directory; `clients` replaces the address for clients."""
        names = {"clients": "client", "control": "control", "core": "core"}
        names |= {"steps": "workers-{}", "results": "results-{}", "tier": "tier-{}"}
        addresses = {field: f"ipc://{folder}/{name}.sock" for field, name in names.items()}
        return cls(**addresses | ({} if clients is None else {"clients": clients}))

    def of_replica(self, replica: int) -> Endpoints:
        """Return these addresses with a replica's own for its core, workers and tier process. Replica 0 has
        the addresses as they are."""
        if replica == 0:
            return self
        own = {}
        for field in ("core", "steps", "results", "tier"):
            folder, slash, name = getattr(self, field).rpartition("/")
            own[field] = f"{folder}{slash}replica-{replica}-{name}"
        return msgspec.structs.replace(self, **own)

    def clients_of(self, frontend: int) -> str:
        """Return the address at which a frontend listens for clients. For frontend N > 0, N is added to the port (if
        the port is 0, any free port is used) or -N to the socket's name."""
        address = self.clients
        if frontend == 0:
            return address
        if address.startswith("tcp://"):
            host, _, port = address.rpartition(":")
            return f"{host}:{int(port) + frontend}" if port not in ("0", "*") else address
        stem, dot, suffix = address.rpartition(".sock")
        return f"{stem}-{frontend}{dot}" if dot and not suffix else f"{address}-{frontend}"

    def steps_of(self, generation: int) -> str:
        return _numbered(self.steps, generation)

    def results_of(self, generation: int) -> str:
        return _numbered(self.results, generation)

    def tier_of(self, number: int) -> str:
        return _numbered(self.tier, number)


def _numbered(address: str, number: int) -> str:
    before, mark, after = address.rpartition("{}")
    return f"{before}{number}{after}" if mark else address


def check_listen(address: str) -> None:
    """Raise ConfigError unless `address` is ipc:///PATH or tcp://HOST:PORT; ZeroMQ takes ports modulo 65536."""
    if address.startswith("tcp://"):
        port = address.rpartition(":")[2]
        if port != "*" and not (port.isdecimal() and int(port) <= 65535):
            raise ConfigError(f"--listen {address}: the port must be in [0, 65535] (0: any free one), got {port!r}")
    elif not address.startswith("ipc:///"):
        raise ConfigError(f"--listen {address} must be ipc:///PATH or tcp://HOST:PORT")


def check_ports(option: str, address: str, num: int, processes: str) -> None:
    """Raise ConfigError if `num` consecutive ports from that of a valid tcp address go beyond 65535. `processes`: the
    message's word for them."""
    port = address.rpartition(":")[2] if address.startswith("tcp://") else "*"
    if port not in ("0", "*") and int(port) + num - 1 > 65535:
        raise ConfigError(f"{option} {address}: {num} {processes} take as many ports, and the last is 65535: lower it")


def split_tcp(address: str) -> tuple[str, int]:
    """Parse tcp://HOST:PORT into (host without brackets, port); ValueError if `address` has another form."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{address} is not of the form tcp://HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def route_to(host: str, port: int) -> tuple[str, str]:
    """Return the IP address of a host, and the local address from which it is reached; OSError if there is no route.
    Sends no packet to it."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(place[0]), str(probe.getsockname()[0])


def tcp_address(host: str, port: int | str) -> str:
    """Return tcp://HOST:PORT, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def joined_http_address(http: str | None, host: str | None, port: int | None) -> str | None:
    """Return [HOST:]PORT from --http, --host and --port; None if none is given. ConfigError if they contradict each
    other."""
    if host is None and port is None:
        return http
    given_host, _, given_port = (http or "").rpartition(":")
    if host is not None and given_host.strip("[]") not in ("", host.strip("[]")):
        raise ConfigError(f"--host {host} is not that of --http {http}: give one of them")
    if port is not None and given_port not in ("", str(port)):
        raise ConfigError(f"--port {port} is not that of --http {http}: give one of them")
    host = host or given_host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{given_port or port or (DEFAULT_PORT if port is None else 0)}"


def http_endpoint(address: str) -> tuple[str, int]:
    """Parse `[HOST:]PORT`, IPv6 in brackets, into (host without brackets, port); ConfigError if invalid."""
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and int(port) <= 65535):
        raise ConfigError(f"--http {address} must be [HOST:]PORT with a port in [0, 65535] (0: any free one)")
    return host.strip("[]") or "127.0.0.1", int(port)
