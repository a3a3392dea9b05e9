"""Checks the options of an engine whose ranks are on several hosts."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from ..endpoints import split_tcp
from ..errors import ConfigError


class HostOptions(NamedTuple):
    """The options of EngineConfig about hosts."""

    hosts: int
    listen_hosts: str | None
    hosts_key_file: str | None
    num_ranks: int  # of each replica
    num_replicas: int
    is_insecure: bool


def check_hosts(options: HostOptions) -> None:
    """Raise ConfigError unless the ranks can be spread over the hosts and the head's address is of one interface."""
    if options.hosts == 1:
        if options.listen_hosts is not None:
            raise ConfigError(f"--listen-hosts {options.listen_hosts} is for --hosts above 1: give both, or neither")
        return
    if options.hosts > options.num_ranks * options.num_replicas:
        replicas = f" × --data-parallel-size {options.num_replicas}" if options.num_replicas > 1 else ""
        raise ConfigError(
            f"--hosts {options.hosts} is above --tensor-parallel-size {options.num_ranks}{replicas}: each host needs a "
            "rank, lower the first or raise the second"
        )
    if options.listen_hosts is None:
        raise ConfigError(
            f"--hosts {options.hosts} needs --listen-hosts tcp://IP:PORT, where `engine-launch join` reaches this host"
        )
    if options.hosts_key_file is None:
        raise ConfigError(
            f"--hosts {options.hosts} needs --hosts-key-file: make it with `engine-launch keygen FILE` and copy it to "
            "each host"
        )
    address = host_address(options.listen_hosts)
    if not (ipaddress.ip_address(address).is_private or options.is_insecure):
        raise ConfigError(
            f"--listen-hosts {options.listen_hosts} is a public address, and ranks exchange tensors without "
            "encryption: give one of a private network or a tunnel, or --insecure"
        )


def host_address(listen_hosts: str) -> str:
    """Return the IP address of tcp://IP:PORT; ConfigError if it is none of one interface."""
    try:
        address = ipaddress.ip_address(split_tcp(listen_hosts)[0])
    except ValueError:
        raise ConfigError(f"--listen-hosts {listen_hosts} must be tcp://IP:PORT with an address of this host") from None
    if address.is_unspecified:
        raise ConfigError(
            f"--listen-hosts {listen_hosts} is all interfaces: give the address of the one that connects the hosts"
        )
    return str(address)
