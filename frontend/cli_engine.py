"""What the subcommands share: which engine they speak to, and how they say what went wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from ..ipc.errors import ConfigError, TokenloomError
from ..ipc.sampling_params import SamplingParams
from .client import Client
from .llm import LLM


def add_engine_choice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--address", metavar="ADDRESS", help="a running engine, as engine-launch prints it")
    group.add_argument("--key-file", metavar="FILE", help="what that engine got as --key-file")
    group.add_argument("--model", metavar="MODEL", help="without --address: start an engine for it; none: the demo")


def open_engine(arguments: argparse.Namespace) -> Client:
    """A client of the engine at --address, or a private engine."""
    if arguments.address is not None:
        return Client(arguments.address, key_file=arguments.key_file)
    return LLM(arguments.model)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy (default: 0.7)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X")
    group.add_argument("--top-k", type=int, default=0, metavar="N")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"(default: {max_tokens})")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
    )


def run_command(name: str, run: Callable[[], int]) -> int:
    """The exit code: 2 for what the caller can mend, 1 for what the engine did, 130 for Ctrl-C."""
    try:
        return run()
    except (ConfigError, ValueError, OSError) as error:
        print(f"engine-launch {name}: {error}", file=sys.stderr)
        return 2
    except TokenloomError as error:
        print(f"engine-launch {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def new_parser(name: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"engine-launch {name}",
        description=description,
        epilog="examples:\n" + "\n".join(f"  engine-launch {name} {example}".rstrip() for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
