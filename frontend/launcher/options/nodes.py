"""vLLM's options for several hosts: --nnodes N --node-rank R --master-addr ADDRESS, named as in torchrun.

Rank 0 is the head: its --listen-hosts is set to the address. The other hosts run `engine-launch join`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....ipc.errors import ConfigError
from ....ipc.sockets.endpoints import tcp_address
from .given import Given

DEFAULT_PORT = 7100
_RANKS, _ADDRESS, _PORT = ("node_rank", "r"), "master_addr", "master_port"
_COUNTS = ("nnodes", "n", "hosts")


def with_nodes(options: Mapping[str, Given]) -> dict[str, Given]:
    """Return the head's options with the ones for several hosts replaced by --listen-hosts. ConfigError if the node
    rank is that of another host, or a number is invalid."""
    others = {name: given for name, given in options.items() if name not in (*_RANKS, _ADDRESS, _PORT)}
    if (rank := _rank(options)) > 0:
        raise ConfigError(f"node rank {rank} is no engine of its own: run `engine-launch join` there")
    address = _address(options)
    if address is not None and "listen_hosts" not in options and any(name in options for name in _COUNTS):
        others["listen_hosts"] = Given(address, options[_ADDRESS].written, options[_ADDRESS].where)
    return others


def join_words(options: Mapping[str, Given]) -> list[str] | None:
    """Return the words after `engine-launch join` for a host that is not the head; None for the head. ConfigError if
    the head's address or the key file is missing."""
    if _rank(options) == 0:
        return None
    address, keys = _address(options), options.get("hosts_key_file")
    if address is None or keys is None:
        missing = "--master-addr ADDRESS" if address is None else "--hosts-key-file FILE"
        raise ConfigError(f"--node-rank {_rank(options)} needs {missing}: the head's")
    return [address, "--key-file", str(keys.value)]


def _rank(options: Mapping[str, Given]) -> int:
    given = next((options[name] for name in _RANKS if name in options), None)
    return 0 if given is None else _number(given)


def _address(options: Mapping[str, Given]) -> str | None:
    if _ADDRESS not in options:
        return None
    port = _number(options[_PORT]) if _PORT in options else DEFAULT_PORT
    return tcp_address(str(options[_ADDRESS].value), port)


def _number(given: Given) -> int:
    text = str(given.value)
    if not text.isdecimal():
        raise ConfigError(f"{given.where}{given.written} must be a whole number, got {text!r:.80}")
    return int(text)
