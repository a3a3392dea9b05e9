"""Checks of the options of an engine with ranks on several hosts."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Literal, Protocol

from ...errors import ConfigError
from ...sockets.endpoints import route_to, split_tcp, tcp_address


class HostOptions(Protocol):
    """The options of EngineConfig about hosts."""

    @property
    def distributed_executor_backend(self) -> Literal["mp", "uni", "ray"]: ...
    @property
    def hosts(self) -> int: ...
    @property
    def listen_hosts(self) -> str | None: ...
    @property
    def hosts_key_file(self) -> str | None: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def insecure(self) -> bool: ...


def check_hosts(options: HostOptions) -> None:
    """Raise ConfigError unless the ranks can be spread over the hosts, and several hosts have --hosts-key-file and a
    private --listen-hosts address of one interface. With Ray neither option is needed."""
    backend = options.distributed_executor_backend
    num_ranks, num_replicas = options.tensor_parallel_size, options.data_parallel_size
    if backend == "uni" and num_ranks > 1:
        raise ConfigError(
            f"--distributed-executor-backend uni is for one rank, --tensor-parallel-size is {num_ranks}: leave the "
            "first out, or give mp"
        )
    if options.hosts == 1:
        if options.listen_hosts is not None:
            raise ConfigError(f"--listen-hosts {options.listen_hosts} is for --hosts above 1: give both, or neither")
        return
    if options.hosts > num_ranks * num_replicas:
        replicas = f" × --data-parallel-size {num_replicas}" if num_replicas > 1 else ""
        raise ConfigError(
            f"--hosts {options.hosts} is above --tensor-parallel-size {num_ranks}{replicas}: each host needs a "
            "rank, lower the first or raise the second"
        )
    if options.listen_hosts is None and backend != "ray":
        raise ConfigError(
            f"--hosts {options.hosts} needs --listen-hosts tcp://IP:PORT, where `engine-launch join` reaches this host"
        )
    if options.hosts_key_file is None and backend != "ray":
        raise ConfigError(
            f"--hosts {options.hosts} needs --hosts-key-file: make it with `engine-launch keygen FILE` and copy it to "
            "each host"
        )
    if options.listen_hosts is not None:
        check_private(options.listen_hosts, options.insecure)


def check_private(listen_hosts: str, is_insecure: bool) -> None:
    """Raise ConfigError if --listen-hosts is a public address without --insecure, or invalid."""
    if not (ipaddress.ip_address(host_address(listen_hosts)).is_private or is_insecure):
        raise ConfigError(
            f"--listen-hosts {listen_hosts} is a public address, and ranks exchange tensors without encryption: give "
            "one of a private network or a tunnel, or --insecure"
        )


def host_address(listen_hosts: str) -> str:
    """Return the IP address of tcp://IP:PORT; ConfigError if it is invalid, or the address of all interfaces."""
    try:
        address = ipaddress.ip_address(split_tcp(listen_hosts)[0])
    except ValueError:
        raise ConfigError(f"--listen-hosts {listen_hosts} must be tcp://IP:PORT with an address of this host") from None
    if address.is_unspecified:
        raise ConfigError(
            f"--listen-hosts {listen_hosts} is all interfaces: give the address of the one that connects the hosts"
        )
    return str(address)


def ray_listen_address() -> str:
    """Return a tcp address for agents placed by Ray: this host's interface to the cluster, any free port. ConfigError
    if there is no cluster, or no route to it."""
    place = ray_address()
    try:
        host, port = split_tcp(f"tcp://{place}")
        return tcp_address(route_to(host, port)[1], 0)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"there is no way to the Ray cluster at {place} ({error}): set RAY_ADDRESS to the HOST:PORT that its "
            "`ray start --head` printed, or give --listen-hosts"
        ) from None


def ray_address() -> str:
    """Return HOST:PORT of the Ray cluster: RAY_ADDRESS, else the address that `ray start` recorded on this host.
    ConfigError if there is neither."""
    given = os.environ.get("RAY_ADDRESS", "auto")
    if given != "auto":
        return given
    try:
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        return (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(
            "--distributed-executor-backend ray: this host is no node of a Ray cluster: run `ray start --head` or "
            "`ray start --address HOST:PORT` here, or set RAY_ADDRESS"
        ) from None
