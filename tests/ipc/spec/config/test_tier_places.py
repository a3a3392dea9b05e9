"""Addresses of tiers: invalid ones are refused, and those on a network need a key file."""

from __future__ import annotations

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.tier_places import events_address_of, listen_address_of, replay_address


@pytest.mark.parametrize(
    "options",
    [
        {"kv_remote": "redis://127.0.0.1:6379/0"},
        {"kv_remote": "redis://user:pw@localhost:6379"},
        {"kv_remote": "valkey://[::1]:6379/0"},
        {"kv_remote": "unix:///run/redis.sock?db=1"},
        {"kv_remote": "rediss://cache.example:6379/0", "kv_key_file": "key"},
        {"kv_peers": "ipc:///tmp/a, tcp://127.0.0.1:5000,"},
        {"kv_peers": "tcp://10.0.0.1:5000", "kv_key_file": "key"},
        {"kv_listen": "tcp://127.0.0.2:0"},
        {"kv_listen": "tcp://*:5000", "kv_key_file": "key"},
    ],
)
def test_valid_addresses_are_accepted(options: dict[str, str]) -> None:
    EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_remote": "rediss://u:secret@cache.example:6379/0"}, "--kv-remote rediss://cache.example:6379/0 needs"),
        ({"kv_remote": "valkey://10.0.0.1"}, "needs --kv-key-file"),
        ({"kv_remote": "redis://0.0.0.0:6379"}, "needs --kv-key-file"),
        ({"kv_remote": "http://:secret@127.0.0.1"}, "must be redis://"),
        ({"kv_remote": "redis://"}, "must be redis://"),
        ({"kv_remote": "unix://"}, "must be redis://"),
        ({"kv_remote": "redis://127.0.0.1:port"}, "no valid host and port"),
        ({"kv_remote": "redis://:secret/more@127.0.0.1"}, "no valid host and port"),
        ({"kv_peers": "tcp://127.0.0.1:5000,tcp://b.example:5000"}, "--kv-peers tcp://b.example:5000 needs"),
        ({"kv_peers": "127.0.0.1:5000"}, "must be ipc:///PATH or tcp://HOST:PORT"),
        ({"kv_listen": "tcp://*:5000"}, "--kv-listen tcp://*:5000 needs --kv-key-file"),
        ({"kv_listen": "tcp://127.0.0.1:70000"}, "with a port in"),
        ({"kv_listen": "ipc://relative"}, "must be ipc:///PATH"),
    ],
)
def test_invalid_or_open_addresses_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_each_replica_has_addresses_of_its_own() -> None:
    events, listen = "tcp://127.0.0.1:5557", "tcp://127.0.0.1:7100"
    all_events = [events_address_of(events, replica) for replica in range(3)]
    ports = [address.rpartition(":")[2] for place in all_events for address in (place, replay_address(place))]
    assert ports == ["5557", "5558", "5559", "5560", "5561", "5562"]
    assert [listen_address_of(listen, replica) for replica in (0, 2)] == [listen, "tcp://127.0.0.1:7102"]
    assert listen_address_of("tcp://127.0.0.1:0", 1) == "tcp://127.0.0.1:0"
    for of in (events_address_of, listen_address_of):
        assert [of("ipc:///a", replica) for replica in (0, 1)] == ["ipc:///a", "ipc:///a-replica-1"]


@pytest.mark.parametrize("option", [{"kv_events": "tcp://127.0.0.1:65531"}, {"kv_listen": "tcp://127.0.0.1:65533"}])
def test_replicas_whose_ports_would_be_too_high_are_refused_with_the_ports(option: dict[str, str]) -> None:
    EngineConfig(data_parallel_size=2, **option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"4 replicas take the ports 6553\d to 6553[68]: give a lower one"):
        EngineConfig(data_parallel_size=4, **option)  # type: ignore[arg-type]
