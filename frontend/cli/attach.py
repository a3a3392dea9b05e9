"""Options of the commands that generate: the engine and the sampling parameters."""

from __future__ import annotations

import argparse
import sys

from ...ipc.params.sampling_params import SamplingParams
from ..client.client import Client
from ..llm import LLM


def add_engine_choice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--address", metavar="ADDRESS", help="a running engine, as engine-launch prints it")
    group.add_argument("--key-file", metavar="FILE", help="that engine's --key-file")
    group.add_argument("--model", metavar="MODEL", help="without --address: start an engine for it; none: the demo")


def open_engine(arguments: argparse.Namespace) -> Client:
    """Connect to the engine at --address, or start a private one."""
    if arguments.address is not None:
        return Client(arguments.address, key_file=arguments.key_file)
    announce_start(arguments.model)
    return LLM(arguments.model)


def announce_start(model: str | None) -> None:
    print(f"starting an engine for {model or 'the demo model'} …", file=sys.stderr)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy (default: 0.7)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X")
    group.add_argument("--top-k", type=int, default=0, metavar="N")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    default = f"(default: {max_tokens or 'as many as fit'})"
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=default)


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "seed", "max_tokens")
    return SamplingParams(**{name: getattr(arguments, name) for name in names})
