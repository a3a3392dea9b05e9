"""Options of gateways and of engines behind them: one line names the mistake."""

from __future__ import annotations

import re

import msgspec
import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.core import GatewayHello, ModelDigest
from tokenloom.ipc.spec.config.checkpoint_digest import tokenizer_digest
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.gateway_places import core_addresses
from tokenloom.tests.support.engine_specs import new_spec

KEYS = {"hosts_key_file": "fleet.key"}
MODEL = ModelDigest(
    weights="", model="m", tokenizer="t", dtype="float32", kv_cache_dtype="auto", block_size=16, max_model_len=512
)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"core_listen": "tcp://127.0.0.1:6000"}, "--core-listen tcp://127.0.0.1:6000 needs --hosts-key-file: make it"),
        ({"cores": "tcp://a:6000"}, "--cores tcp://a:6000 needs --hosts-key-file"),
        ({"core_listen": "tcp://0.0.0.0:6000", **KEYS}, "is all interfaces: give the address of the one"),
        ({"core_listen": "tcp://[::]:6000", **KEYS}, "is all interfaces"),
        ({"core_listen": "tcp://host:6000", **KEYS}, "must be tcp://IP:PORT with an address of this host"),
        ({"core_listen": "tcp://127.0.0.1:0", **KEYS}, "needs a port that stays the same"),
        ({"core_listen": "tcp://127.0.0.1:65535", "data_parallel_size": 2, **KEYS}, "2 replicas take as many ports"),
        ({"core_listen": "ipc:///x", **KEYS}, "must be tcp://HOST:PORT"),
        ({"cores": "tcp://a:6000,a:6001", **KEYS}, "--cores a:6001 must be tcp://HOST:PORT"),
        ({"cores": "tcp://a:6000,tcp://a:6000", **KEYS}, "must name each core once"),
        ({"cores": " , ", **KEYS}, "must name each core once"),
        ({"cores": "tcp://a:1", "core_listen": "tcp://127.0.0.1:2", **KEYS}, "leave one of them out"),
        ({"cores": "tcp://a:1", "data_parallel_size": 2, **KEYS}, "a gateway starts no replicas"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_cores_of_replicas_listen_at_the_next_ports_and_a_gateway_has_no_core() -> None:
    config = EngineConfig(core_listen="tcp://[::1]:6000", data_parallel_size=2, **KEYS)  # type: ignore[arg-type]
    spec = new_spec(config=config, digest=MODEL)
    assert [spec.of_replica(replica).core_listen for replica in (0, 1)] == ["tcp://[::1]:6000", "tcp://[::1]:6001"]
    assert spec.remote_cores == [] and spec.num_cores == 2 and spec.hello_to_core == spec.hello
    gateway = new_spec(config=EngineConfig(cores="tcp://a:1, tcp://b:1,tcp://b:2", **KEYS), digest=MODEL)  # type: ignore[arg-type]
    assert gateway.remote_cores == core_addresses("tcp://a:1,tcp://b:1,tcp://b:2") and gateway.num_cores == 3
    assert isinstance(gateway.hello_to_core, GatewayHello) and gateway.core_listen is None
    EngineConfig(core_listen="tcp://0.0.0.0:6000", insecure=True, **KEYS)  # type: ignore[arg-type]


def test_only_known_weights_make_a_digest_that_clients_may_trust() -> None:
    assert MODEL.text == ""
    one, other = (ModelDigest(**{**_fields(MODEL), "weights": name}) for name in ("one", "other"))
    assert one.text and one.text != other.text
    assert MODEL.difference(one) == "" and one.difference(other) == "its weights is other, not one"


def _fields(digest: ModelDigest) -> dict[str, object]:
    return {name: getattr(digest, name) for name in digest.__struct_fields__}


def test_tokenizers_differ_by_their_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("tokenizer") for _ in range(3)]
    for folder, text in zip(folders, ("a", "a", "b"), strict=True):
        (folder / "tokenizer.json").write_text(text)
    one, same, other = map(tokenizer_digest, folders)
    assert one == same != other


def test_a_gateway_compares_media_and_adapters_only_if_it_serves_them() -> None:
    both = msgspec.structs.replace(MODEL, media="m1", max_lora_rank=64, lora_targets="q_proj")
    assert MODEL.difference(both) == "" and both.difference(both) == ""
    assert both.difference(MODEL) == "its media is none, not m1"
    others: dict[str, object] = {"media": "m2", "max_lora_rank": 8, "lora_targets": ""}
    for name, value in others.items():
        assert both.difference(msgspec.structs.replace(both, **{name: value})).startswith(f"its {name} is ")
