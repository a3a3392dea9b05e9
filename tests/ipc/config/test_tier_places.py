"""Addresses of tiers: invalid ones are refused, and those on a network need a key file."""

from __future__ import annotations

import pytest

from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ConfigError


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
