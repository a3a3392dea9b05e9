"""The host of each rank, and the fields that are equal on all hosts."""

from __future__ import annotations

import pytest

from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import new_spec


def spread(num_ranks: int, num_hosts: int, num_replicas: int = 1) -> EngineSpec:
    options = {} if num_hosts == 1 else {"listen_hosts": "tcp://10.0.0.1:7100", "hosts_key_file": "k"}
    config = EngineConfig(tensor_parallel_size=num_ranks, data_parallel_size=num_replicas, hosts=num_hosts, **options)
    return new_spec(config=config, group_keys=Keys.generate(), host_address="10.0.0.1")


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(1, 1), (4, 1), (2, 2), (4, 2), (4, 3), (8, 3), (8, 5), (7, 7)])
def test_neighbours_share_a_host_and_no_host_has_two_workers_more_than_another(
    num_ranks: int, num_hosts: int, num_replicas: int
) -> None:
    spec = spread(num_ranks, num_hosts, num_replicas)
    workers = [(spec.of_replica(replica), rank) for replica in range(num_replicas) for rank in spec.ranks]
    hosts = [replica.host_of(rank) for replica, rank in workers]
    counts = [hosts.count(host) for host in range(num_hosts)]
    assert hosts == sorted(hosts) and hosts[0] == 0
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1
    numbers = [replica.local_number(rank) for replica, rank in workers]
    assert numbers == [number for count in counts for number in range(count)]
    assert [len(replica.local_workers(rank)) for replica, rank in workers] == [counts[host] for host in hosts]


def test_replicas_may_be_on_hosts_of_their_own() -> None:
    spec = spread(1, 3, 3)
    assert [spec.of_replica(replica).host_of(Rank(0, 0)) for replica in range(3)] == [0, 1, 2]


def test_a_rank_on_another_host_has_the_heads_fingerprint_and_its_control_address() -> None:
    head = spread(2, 2)
    other = head.on_host("10.0.0.2", "/run/there", "/models/there")
    assert other.fingerprint == head.fingerprint and other.endpoints.control == head.endpoints.control
    assert other.run_directory == "/run/there" and other.model_folder == "/models/there"
    assert other.host_of(Rank(0, 1)) == 1 and other.local_number(Rank(0, 1)) == 0
    assert spread(2, 2).fingerprint != head.fingerprint, "keys are new for each engine"


def test_replicas_share_nothing_but_the_frontend_and_are_one_engine() -> None:
    spec = new_spec(config=EngineConfig(data_parallel_size=3))
    replicas = [spec.of_replica(replica) for replica in range(3)]
    assert replicas[0] == spec and len({each.fingerprint for each in replicas}) == 1
    for name in ("core", "steps", "results", "tier"):
        assert len({getattr(each.endpoints, name) for each in replicas}) == 3
    for name in ("control", "clients"):
        assert len({getattr(each.endpoints, name) for each in replicas}) == 1
    assert len({each.own_file("blocks") for each in replicas}) == 3
    assert len({each.identity("worker 0", 1) for each in replicas}) == 3
