"""`engine-launch status [ADDRESS]`: shows the model and state of a running engine."""

from __future__ import annotations

import argparse
import json

import msgspec

from ....ipc.messages.client import Health, Info
from ...client.client import Client
from ...launcher.engine_record import running_engines
from ..attach import add_api_key
from ..engines import StandardTerminal, check_address, client_places, engine_at
from ..http_engine import HttpEngine

DESCRIPTION = "Show the model and state of a running engine. Exit code 0: it serves; 1: it does not."
EXAMPLES = ["", "http://127.0.0.1:8000", "tcp://10.0.0.7:5555 --key-file engine.key --json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "as engine-launch prints it; none: the engine of this user that runs"
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help=text)
    parser.add_argument("--key-file", metavar="FILE", help="the engine's --key-file")
    add_api_key(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="X", help="(default: 5)")


def run(arguments: argparse.Namespace) -> int:
    engines = running_engines()
    address: str | None = arguments.address
    if address is not None and check_address(address).startswith("http") and engine_at(address, engines) is None:
        return _show_http(HttpEngine(address, arguments.api_key), as_json=arguments.json)
    places, key_file = client_places(address, arguments.key_file, engines, StandardTerminal())
    with Client(places, connect_timeout_s=arguments.timeout_s, key_file=key_file) as client:
        health, info, adapters = client.health(), client.info(), client.list_adapters()
    if arguments.json:
        print(json.dumps(msgspec.to_builtins({"health": health, "info": info, "adapters": adapters})))
    else:
        print("\n".join(lines(health, info, len(adapters))))
    return 0 if health.is_ready and not health.is_stalled else 1


def _show_http(engine: HttpEngine, *, as_json: bool) -> int:
    """Show what an engine elsewhere says of itself over HTTP."""
    is_well, health = engine.health()
    if as_json:
        print(json.dumps({"health": health, "info": {"model": engine.model}}))
    else:
        print(f"{engine.model}: {health.get('status', 'ok' if is_well else 'not well')}")
        print("\n".join(f"{name:10} {value}" for name, value in health.items() if name != "status" and value != ""))
    return 0 if is_well else 1


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
