"""Rendezvous: the store of torch.distributed through which the ranks of a group find each other, and the network
interface that they use.

On one host the store is a file in the run directory, and the interface is the loopback device. Over several hosts it is
a TCPStore in the first rank, on the address that connects the hosts; the supervisor passes its port on. Its keys begin
with the group's secret, so that ranks of another group do not find this one. torch's stores offer no protection from
others who can reach the port.
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
    """Interface of a rendezvous. Each group needs a new one."""

    def interface(self) -> str:
        """Return the name of the network interface to use."""

    def store(self, rank: int, size: int, timeout_s: float) -> Store:
        """Return the store that all ranks share."""


@dataclass(frozen=True)
class LocalRendezvous:
    """Rendezvous of ranks on one host: a file."""

    file: Path

    def interface(self) -> str:
        return LOOPBACK  # the host name, gloo's default, may have no address

    def store(self, rank: int, size: int, timeout_s: float) -> Store:
        return FileStore(str(self.file), size)


@dataclass(frozen=True)
class NetworkRendezvous:
    """Rendezvous of ranks on several hosts: a TCPStore of the first rank."""

    address: str  # IP address of this host
    secret: str  # the group's secret
    publish: Callable[[str], None]  # called on the first rank, with the store's address
    wait: Callable[[], str]  # called on the others; waits for that address and returns it

    def interface(self) -> str:
        """Return the interface that has this host's address. ConfigError if none has it."""
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
            listener = socket.create_server((self.address, 0), family=family)  # TCPStore would listen on all interfaces
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
