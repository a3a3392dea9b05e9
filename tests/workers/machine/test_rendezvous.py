"""Ranks meet at a store on the address that connects their hosts, and nowhere else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets.endpoints import split_tcp
from tokenloom.workers.machine.rendezvous import LOOPBACK, LocalRendezvous, NetworkRendezvous

TIMEOUT_S = 120.0  # of a hang


def test_all_ranks_meet_at_the_store_of_the_first() -> None:
    addresses: SimpleQueue[str] = SimpleQueue()
    first = NetworkRendezvous("127.0.0.2", "secret-1", addresses.put, lambda: "")
    other = NetworkRendezvous("127.0.0.3", "secret-1", addresses.put, lambda: addresses.get(timeout=TIMEOUT_S))
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(other.store, 1, 2, TIMEOUT_S)
        mine = first.store(0, 2, TIMEOUT_S)
        mine.set("key", "value")
        assert theirs.result(TIMEOUT_S).get("key") == b"value"


def test_the_store_listens_on_one_address_and_keeps_groups_apart() -> None:
    addresses: SimpleQueue[str] = SimpleQueue()
    store = NetworkRendezvous("127.0.0.2", "secret-1", addresses.put, lambda: "").store(0, 1, TIMEOUT_S)
    store.set("key", "value")
    address = addresses.get(timeout=TIMEOUT_S)
    host, port = split_tcp(address)
    assert host == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    later = NetworkRendezvous("127.0.0.3", "secret-2", addresses.put, lambda: address).store(1, 1, TIMEOUT_S)
    assert not later.check(["key"])


def test_the_interface_is_that_of_the_address() -> None:
    assert LocalRendezvous(Path("/nowhere")).interface() == LOOPBACK
    assert NetworkRendezvous("127.0.0.9", "", lambda address: None, lambda: "").interface() == LOOPBACK
    with pytest.raises(ConfigError, match=r"no network interface of this host has the address 192\.0\.2\.1"):
        NetworkRendezvous("192.0.2.1", "", lambda address: None, lambda: "").interface()
