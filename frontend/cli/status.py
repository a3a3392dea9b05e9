"""`engine-launch status ADDRESS`: shows the model and state of a running engine."""

from __future__ import annotations

import argparse
import json

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.messages.client import Health, Info
from ..client.client import Client

DESCRIPTION = "Show the model and state of a running engine. Exit code 0: it serves; 1: it does not."
EXAMPLES = ["ipc:///run/loom.sock", "tcp://10.0.0.7:5555 --key-file engine.key --json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", help="as engine-launch prints it: ipc://… or tcp://…")
    parser.add_argument("--key-file", metavar="FILE", help="the engine's --key-file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="X", help="(default: 5)")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.address.startswith(("ipc://", "tcp://")):
        raise ConfigError(f"{arguments.address} is not an engine's address: it must begin with ipc:// or tcp://")
    timeout_s = arguments.timeout_s
    with Client(arguments.address, connect_timeout_s=timeout_s, key_file=arguments.key_file) as client:
        health, info, adapters = client.health(), client.info(), client.list_adapters()
    if arguments.json:
        print(json.dumps(msgspec.to_builtins({"health": health, "info": info, "adapters": adapters})))
    else:
        print("\n".join(lines(health, info, len(adapters))))
    return 0 if health.is_ready and not health.is_stalled else 1


def lines(health: Health, info: Info, num_adapters: int = 0) -> list[str]:
    """Format health, model and adapters as lines for people."""
    used = info.num_kv_blocks - health.num_free_blocks
    share = used / info.num_kv_blocks if info.num_kv_blocks else 0.0
    shown = [
        f"{info.model}: {health.state} (tokenloom {info.version}, {info.dtype} on {info.device})",
        f"kernels    {info.kernels}",
        f"requests   {health.num_running} running, {health.num_waiting} waiting",
        f"KV cache   {used} of {info.num_kv_blocks} blocks of {info.block_size} tokens ({share:.1%})",
        *([f"adapters   {num_adapters} loaded, up to {info.max_loras} in a batch"] if info.max_loras else []),
        f"lengths    up to {info.max_model_len} tokens, vocabulary {info.vocab_size}",
        f"steps      {health.step}, the last {health.step_age_s:.1f} s ago",
        f"restarts   {health.num_restarts}",
    ]
    return [*shown, f"last loss  {health.last_failure}"] if health.last_failure else shown
