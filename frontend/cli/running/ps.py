"""`engine-launch ps`: lists the engines of this user that run, with their state and load."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ....ipc.errors import TokenloomError
from ....ipc.messages.client import Health, Info
from ...client.client import Client
from ...launcher.engine_record import EngineRecord, running_engines
from ..engines import age

DESCRIPTION = "List the engines of this user that run on this machine."
EXAMPLES = ["", "--json"]
HEAD = ("MODEL", "STATE", "REQUESTS", "KV CACHE", "UP", "PID", "ADDRESS")


class EngineState(msgspec.Struct, frozen=True):
    """A running engine and what it answered; None: nothing within the time limit, as while it is busy or suspended."""

    engine: EngineRecord
    health: Health | None = None
    info: Info | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser.add_argument("--timeout-s", type=float, default=2.0, metavar="X", help="for each engine (default: 2)")


def run(arguments: argparse.Namespace) -> int:
    states = ask_all(running_engines(), arguments.timeout_s)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(states)))
    elif states:
        print("\n".join(table(states, time.time())))
    else:
        print("no engine of this user runs: engine-launch serve MODEL starts one")
    return 0


def ask_all(engines: Sequence[EngineRecord], timeout_s: float) -> list[EngineState]:
    """Ask all engines at once for their health and sizes."""
    if not engines:
        return []
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(lambda engine: _ask(engine, timeout_s), engines))


def _ask(engine: EngineRecord, timeout_s: float) -> EngineState:
    try:
        with Client(
            engine.addresses, connect_timeout_s=timeout_s, reconnect_timeout_s=timeout_s, key_file=engine.key_file
        ) as client:
            return EngineState(engine, client.health(), client.info())
    except TokenloomError:
        return EngineState(engine)


def table(states: Sequence[EngineState], now: float) -> list[str]:
    """Return the lines of the table: a header, and a line for each engine. `now`: unix seconds."""
    rows = [HEAD, *(_cells(state, now) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(state: EngineState, now: float) -> tuple[str, ...]:
    engine = state.engine
    place = engine.http_address or engine.addresses[0]
    if engine.is_private:
        place += " (of a program)"
    asked = ("no answer", "", "")
    if (health := state.health) is not None and (info := state.info) is not None:
        used = (info.num_kv_blocks - health.num_free_blocks) / max(info.num_kv_blocks, 1)
        asked = (health.state, f"{health.num_running} + {health.num_waiting} waiting", f"{used:.0%}")
    return (engine.model, *asked, age(now - engine.started_at), str(engine.pid), place)
