"""Options of the commands that generate: the engine and the sampling parameters."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from ...ipc.errors import ConfigError
from ...ipc.params.sampling_defaults import FIRST_IMPRESSION, chat_sampling
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.spec.config.engine_config import API_KEY_VARIABLE
from ..client.client import Client
from ..launcher.engine_record import EngineRecord, running_engines
from ..launcher.options.environment import key_of_environment
from ..llm import LLM
from .attached import Attached, ClientEngine
from .engines import StandardTerminal, check_address, engine_at, engine_meant, is_address
from .http_engine import HttpEngine


def add_engine_choice(parser: argparse.ArgumentParser, *, takes_word: bool = False) -> None:
    """Add the options that name an engine; with `takes_word` a word without a flag may name it, too."""
    text = "a model to start an engine for, or the address of one that runs; none: the one that runs, else the demo"
    if takes_word:
        parser.add_argument("engine", nargs="?", metavar="MODEL|ADDRESS", help=text)
    group = parser.add_argument_group("engine")
    group.add_argument("--address", metavar="ADDRESS", help="a running engine: http://…, ipc://… or tcp://…")
    group.add_argument("--key-file", metavar="FILE", help="the --key-file of an engine at tcp://…")
    add_api_key(group)
    group.add_argument("--model", metavar="MODEL", help="start an engine for it, which ends with this command")


def add_api_key(group: argparse._ActionsContainer) -> None:
    found = key_of_environment(os.environ)
    text = f"the --api-key of an engine at http://…; none: {API_KEY_VARIABLE}"
    group.add_argument("--api-key", metavar="KEY", default=found and found.keys[0], help=text)


def open_engine(arguments: argparse.Namespace) -> Attached:
    """Attach to the engine that the arguments name: at an address, or one that serves the model, else a private one.
    Without a name it is the engine of this user that runs; if there is none, a private one with the demo model."""
    word: str | None = getattr(arguments, "engine", None)
    address: str | None = arguments.address
    model: str | None = arguments.model
    named = [each for each in (word, address, model) if each is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} name two engines: give one of them")
    if word is not None and is_address(word):
        address = word
    elif word is not None:
        model = word
    engines = running_engines()
    if address is not None:
        found = engine_at(check_address(address), engines)
        if found is None and address.startswith("http"):
            return HttpEngine(address, arguments.api_key)
        return ClientEngine(_client(found, address, arguments.key_file))
    found = engine_meant(model, engines, StandardTerminal())
    if found is not None:
        print(f"using the engine that serves {found.model} (pid {found.pid})", file=sys.stderr)
        return ClientEngine(_client(found, None, arguments.key_file))
    announce_start(model)
    return ClientEngine(LLM(model))


def _client(engine: EngineRecord | None, address: str | None, key_file: str | None) -> Client:
    """Connect to a running engine, or to `address` of one that is not this user's."""
    if engine is None:
        assert address is not None
        return Client(address, key_file=key_file)
    return Client(engine.addresses, key_file=key_file or engine.key_file)


def announce_start(model: str | None) -> None:
    print(f"starting an engine for {model or 'the demo model'} …", file=sys.stderr)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    usual = ", ".join(f"{name} {value:g}" for name, value in FIRST_IMPRESSION.items())
    group = parser.add_argument_group("sampling", f"none: the model's own defaults; if it has none, {usual}")
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    text = f"the longest answer (default: {max_tokens}, unless the model or its operator names another)"
    group.add_argument("--max-tokens", type=int, metavar="N", help=text)


def sampling_params(arguments: argparse.Namespace, defaults: Mapping[str, float], max_tokens: int) -> SamplingParams:
    """Return the parameters that the arguments give, and for the others the engine's `defaults`. If these name no
    sampling at all it is FIRST_IMPRESSION; if they name no longest answer it is `max_tokens`."""
    names: Sequence[str] = ("temperature", "top_p", "top_k", "seed", "max_tokens")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return SamplingParams(**({"max_tokens": max_tokens} | chat_sampling(defaults) | given))
