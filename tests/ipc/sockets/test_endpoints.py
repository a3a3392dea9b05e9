"""Every socket of an engine has an address of its own; a successor of a process has a new one."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.sockets.endpoints import Endpoints
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import new_spec

FOLDER = "/run/{}/1a2b3c4d"  # braces are legal in a path


def test_every_socket_and_every_successor_has_an_address_of_its_own() -> None:
    places = Endpoints.in_folder(FOLDER)
    numbered = [find(number) for find in (places.steps_of, places.results_of, places.tier_of) for number in (0, 1)]
    addresses = [places.clients, places.control, places.core, *numbered]
    assert len(set(addresses)) == 9
    assert all(address.startswith(f"ipc://{FOLDER}/") and address.endswith(".sock") for address in addresses)


def test_tcp_addresses_are_used_as_they_are() -> None:
    places = Endpoints.in_folder(FOLDER, "tcp://127.0.0.1:5555")
    places = msgspec.structs.replace(places, steps="tcp://10.0.0.1:*")
    assert (places.clients, places.steps_of(3)) == ("tcp://127.0.0.1:5555", "tcp://10.0.0.1:*")


def test_a_child_reads_the_endpoints_of_its_parent() -> None:
    spec = new_spec(endpoints=Endpoints.in_folder(FOLDER))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=EngineSpec).endpoints == spec.endpoints


def test_each_rank_of_a_group_has_a_name_from_which_its_process_reads_it() -> None:
    ranks = [*new_spec(config=EngineConfig(tensor_parallel_size=3)).ranks, Rank(pp=2, tp=1)]
    assert [str(rank) for rank in ranks] == ["0", "1", "2", "2.1"]
    assert [Rank.parse(str(rank)) for rank in ranks] == ranks


@pytest.mark.parametrize(
    ("clients", "second"),
    [
        (None, "ipc:///run/client-1.sock"),
        ("ipc:///tmp/engine", "ipc:///tmp/engine-1"),
        ("ipc:///tmp/engine.sock", "ipc:///tmp/engine-1.sock"),
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"),
        ("tcp://[::1]:5555", "tcp://[::1]:5556"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
    ],
)
def test_each_frontend_has_an_address_of_its_own(clients: str | None, second: str) -> None:
    endpoints = Endpoints.in_folder("/run", clients)
    assert endpoints.clients_of(0) == endpoints.clients
    assert endpoints.clients_of(1) == second
