"""`engine-launch launch AGENT`: runs a coding agent with the engine that runs, or prints the set-up."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ....ipc.errors import ConfigError
from ...launcher.engine_record import running_engines
from ...launcher.options.environment import key_of_environment
from ..attach import add_api_key
from ..engines import StandardTerminal, check_address, choose, engine_at, url_of
from ..http_engine import HttpEngine
from .agent import Agent, Place
from .claude import CLAUDE
from .codex import CODEX

DESCRIPTION = (
    "Run Claude Code or Codex with the engine that runs. They are set up by environment variables and arguments; their "
    "configuration files stay as they are. Words after -- are arguments of theirs."
)
EXAMPLES = ["claude", "codex --print", 'codex -- exec "Say hello."', '--address http://10.0.0.7:8000 claude -- -p "Hi"']
TAKES_REST = True
AGENTS = {each.program: each for each in (CLAUDE, CODEX)}
ROOM = 32768  # tokens that give an agent room to work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", choices=[*AGENTS], help="the coding agent")
    parser.add_argument("rest", nargs="*", metavar="-- ARG", help="arguments of the agent")
    text = "the HTTP address of an engine, or of a proxy; none: that of the engine of this user that runs"
    parser.add_argument("--address", metavar="URL", help=text)
    add_api_key(parser)
    parser.add_argument("--print", action="store_true", help="print the set-up for a shell, and run nothing")


def run(arguments: argparse.Namespace) -> int:
    agent = AGENTS[arguments.agent]
    place = find_place(arguments.address, arguments.api_key)
    check_room(agent, place)
    set_up = agent.set_up(place)
    if arguments.print:
        secrets: dict[str, str] = {}
        if (key := key_of_environment(os.environ)) is not None:
            secrets[key.keys[0]] = key.name
        print("\n".join(set_up.lines(agent.program, arguments.rest, secrets)))
        return 0
    program = shutil.which(agent.program)
    if program is None:
        raise ConfigError(
            f"{agent.name} is not installed: npm install -g {agent.package} installs the command {agent.program}"
        )
    print(f"{agent.name} uses {place.model} at {place.url} ({place.max_model_len} tokens)", file=sys.stderr, flush=True)
    return become(program, [*set_up.arguments, *arguments.rest], set_up.environment(os.environ))


def become(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the program in place of this process, so that it has the terminal and its signals to itself."""
    os.execve(program, [program, *arguments], environment)


def find_place(address: str | None, api_key: str | None) -> Place:
    """Return the engine at an address, or the one of this user that runs. ConfigError if there is none, or if it serves
    no HTTP."""
    url = find_url(address)
    served = HttpEngine(url, api_key)
    if served.max_model_len is None:
        raise ConfigError(f"{url} does not say how long its context is: it is no engine of ours")
    return Place(url=url, model=served.model, max_model_len=served.max_model_len, api_key=api_key)


def find_url(address: str | None) -> str:
    engines = running_engines()
    if address is None:
        engine = choose(engines, StandardTerminal())
        if engine is None:
            raise ConfigError(
                f"no engine of this user runs: engine-launch serve MODEL --max-model-len {ROOM} starts one, or give "
                "the --address of another"
            )
        return url_of(engine)
    engine = engine_at(check_address(address), engines)
    if engine is not None:
        return url_of(engine)
    if not address.startswith("http"):
        raise ConfigError(f"no engine of this user serves at {address}: give the address of its HTTP server")
    return address.rstrip("/").removesuffix("/v1")


def check_room(agent: Agent, place: Place) -> None:
    """Raise ConfigError if the agent's first request does not fit the served context; warn if it takes most of it."""
    said = (
        f"{agent.name}'s first request has about {agent.num_tokens} tokens before a word of yours (measured with "
        f"{agent.measured}), and {place.model} is served with {place.max_model_len}"
    )
    if place.max_model_len <= agent.num_tokens:
        raise ConfigError(f"{said}: serve it with --max-model-len {ROOM} or more, or a model with a longer context")
    if place.max_model_len < 2 * agent.num_tokens:
        print(f"warning: {said}: little is left for the work; --max-model-len {ROOM} gives room", file=sys.stderr)
