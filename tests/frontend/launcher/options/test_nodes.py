"""vLLM's options for several hosts mean our own."""

from __future__ import annotations

import pytest

from tokenloom.frontend.launcher.options.given import Given
from tokenloom.frontend.launcher.options.nodes import join_words
from tokenloom.frontend.launcher.options.options import new_config
from tokenloom.ipc.errors import ConfigError


def given(**options: object) -> dict[str, Given]:
    return {name: Given(value, f"--{name.replace('_', '-')}") for name, value in options.items()}


HEAD = {"tensor_parallel_size": 4, "nnodes": 2, "hosts_key_file": "k", "master_addr": "10.0.0.1"}


def test_the_first_node_is_the_head_and_any_other_joins() -> None:
    config = new_config(given(**HEAD, node_rank=0, master_port="29501"))
    assert (config.hosts, config.listen_hosts) == (2, "tcp://10.0.0.1:29501")
    assert new_config(given(**HEAD)).listen_hosts == "tcp://10.0.0.1:7100"
    assert new_config(given(**HEAD | {"master_addr": "8.8.8.8"}, insecure=True)).hosts == 2
    assert join_words(given(**HEAD, node_rank="0")) is None
    joins = {"10.0.0.1": {"r": "1", "headless": True}, "fd00::1": {"node_rank": 3}}
    for address, options in joins.items():
        host = f"[{address}]" if ":" in address else address
        words = join_words(given(**HEAD | {"master_addr": address}, **options))
        assert words == [f"tcp://{host}:7100", "--key-file", "k"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_rank": "x"}, "--node-rank must be a whole number, got 'x'"),
        ({"node_rank": 1}, "--node-rank 1 needs --master-addr ADDRESS"),
        ({"node_rank": 1, "master_addr": "10.0.0.1"}, "--node-rank 1 needs --hosts-key-file FILE"),
        ({"node_rank": 1, "master_addr": "10.0.0.1", "master_port": "p"}, "--master-port must be a whole number"),
        ({"hosts": 2}, "--hosts 2 is above --tensor-parallel-size 1"),
        (
            {"hosts": 5, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "size 2 × --data-parallel-size 2: each host",
        ),
        ({"hosts": 2, "tensor_parallel_size": 2}, "--hosts 2 needs --listen-hosts tcp://IP:PORT"),
        ({"listen_hosts": "tcp://10.0.0.1:7100"}, "--listen-hosts tcp://10.0.0.1:7100 is for --hosts above 1"),
        ({**HEAD, "hosts_key_file": None}, "--nnodes 2 needs --hosts-key-file"),
        ({**HEAD, "master_addr": "0.0.0.0"}, "is all interfaces"),
        ({**HEAD, "master_addr": "head.example"}, "must be tcp://IP:PORT with an address of this host"),
        ({**HEAD, "master_addr": "8.8.8.8"}, "is a public address"),
    ],
)
def test_a_node_without_a_head_and_a_head_that_cannot_spread_its_ranks_are_errors(
    options: dict[str, object], message: str
) -> None:
    found = given(**{name: value for name, value in options.items() if value is not None})
    with pytest.raises(ConfigError, match=message):
        join_words(found) or new_config(found)
    with pytest.raises(ConfigError, match="node rank 1 is no engine of its own: run `engine-launch join` there"):
        new_config(given(**HEAD, node_rank=1))
