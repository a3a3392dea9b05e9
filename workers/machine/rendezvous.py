"""Rendezvous: where the ranks of a group meet, a store of torch.distributed, and the network interface they use.

On one host this is a file in the run directory and the loopback device. Over several hosts it is a TCPStore in the
first rank, on the address that connects the hosts; the supervisor passes its port on. Keys begin with the group's own
secret, so that ranks of another group do not meet it; torch's stores have no defence against a stranger who reaches
the port.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import psutil
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from ...ipc.errors import ConfigError
from ...ipc.sockets.endpoints import split_tcp, tcp_address

LOOPBACK = "lo"


class Rendezvous(Protocol):
    """Interface of a meeting place, which must be new for each group."""

    def interface(self) -> str:
        """Return the name of the network interface to use."""

    def store(self, rank: int, size: int, timeout_s: float) -> Store:
        """Return the store at which all ranks meet."""


@dataclass(frozen=True)
class LocalRendezvous:
    """Meeting place of ranks on one host: a file."""

    file: Path

    def interface(self) -> str:
        return LOOPBACK  # the host name, gloo's default, may have no address

    def store(self, rank: int, size: int, timeout_s: float) -> Store:
        return FileStore(str(self.file), size)


@dataclass(frozen=True)
class NetworkRendezvous:
    """Meeting place of ranks on several hosts: a TCPStore of the first rank."""

    address: str  # IP address of this host
    secret: str  # of the group
    publish: Callable[[str], None]  # called by the first rank with the store's address
    wait: Callable[[], str]  # returns that address on the others

    def interface(self) -> str:
        """Return the interface that has our address; ConfigError if none has it."""
        if ipaddress.ip_address(self.address).is_loopback:
            return LOOPBACK
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == self.address for each in addresses):
                return str(name)
        raise ConfigError(f"no network interface of this host has the address {self.address}")

    def store(self, rank: int, size: int, timeout_s: float) -> Store:
        timeout = timedelta(seconds=timeout_s)
        if rank:
            host, port = split_tcp(self.wait())
            store = TCPStore(host, port, is_master=False, timeout=timeout)
        else:
            family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
            listener = socket.create_server((self.address, 0), family=family)  # TCPStore's own has all interfaces
            port = listener.getsockname()[1]
            store = TCPStore(
                self.address,
                port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self.publish(tcp_address(self.address, port))
        return PrefixStore(self.secret, store)
