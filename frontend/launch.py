"""`engine-launch`: the command. Parses, starts a supervisor, serves until told to stop.

Exit codes: 0 after a clean stop, 2 for a configuration that cannot be served, 1 when the engine died.
LLM and AsyncLLM start the same command with --config-json, a lifeline and a descriptor for the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..ipc import log
from ..ipc.addresses import RunDirectory
from ..ipc.config import EngineConfig
from ..ipc.errors import ConfigError, TokenloomError, error_info
from ..ipc.keys import Keys
from ..ipc.lifeline import start_lifeline
from ..ipc.title import set_title
from .args import add_engine_arguments, engine_config
from .resolve import resolve
from .supervisor import Supervisor

Report: TypeAlias = Callable[[str | None, Exception | None], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, or run the subcommand that the first argument names."""
    argv = sys.argv[1:] if argv is None else argv
    command = COMMANDS.get(argv[0]) if argv else None
    return serve(argv) if command is None else command(argv[1:])


def keygen(argv: Sequence[str]) -> int:
    """Write a key file for --key-file and Client(key_file=…)."""
    parser = argparse.ArgumentParser(prog="engine-launch keygen", description=keygen.__doc__)
    parser.add_argument("file", type=Path, help="where to write it; only you will be able to read it")
    arguments = parser.parse_args(argv)
    try:
        Keys.generate().save(arguments.file)
    except ConfigError as error:
        print(f"engine-launch keygen: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.file}: give it to the engine as --key-file, and to each client as key_file")
    return 0


def batch(argv: Sequence[str]) -> int:
    from .cli_batch import batch

    return batch(argv)


def chat(argv: Sequence[str]) -> int:
    from .cli_chat import chat

    return chat(argv)


def complete(argv: Sequence[str]) -> int:
    from .cli_complete import complete

    return complete(argv)


def status(argv: Sequence[str]) -> int:
    from .cli_status import status

    return status(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {  # each imports what it needs when it is run
    "batch": batch,
    "chat": chat,
    "complete": complete,
    "keygen": keygen,
    "status": status,
}


def serve(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="engine-launch",
        description="Serve a model: starts one frontend, one core and one worker per rank.",
        epilog="examples:  engine-launch\n           engine-launch --model ./Qwen3-0.6B --tp 2 --listen tcp://127.0.0.1:5555",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-json", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    add_engine_arguments(parser)
    arguments = parser.parse_args(argv)
    set_title("tokenloom supervisor")
    report = _report_to(arguments.ready_fd)
    try:
        config = _config(arguments)
        log.configure("supervisor", config.log_level)
        _serve(config, arguments.lifeline_fd, report)
    except ConfigError as error:
        print(f"engine-launch: {error}", file=sys.stderr)
        report(None, error)
        return 2
    except TokenloomError as error:
        print(f"engine-launch: {error}", file=sys.stderr)
        report(None, error)
        return 1
    return 0


def _config(arguments: argparse.Namespace) -> EngineConfig:
    if arguments.config_json:
        return msgspec.json.decode(arguments.config_json, type=EngineConfig)
    return engine_config(arguments)


def _serve(config: EngineConfig, lifeline_fd: int | None, report: Report) -> None:
    run_directory = RunDirectory.create()
    try:
        supervisor = Supervisor(resolve(config, run_directory), run_directory, _announce)
    except BaseException:
        run_directory.remove()
        raise
    if lifeline_fd is not None:
        start_lifeline(lifeline_fd, supervisor.remove_files)
    try:
        supervisor.start()
        report(supervisor.address, None)
        supervisor.run()
    finally:
        supervisor.stop()


def _announce(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


def _report_to(fd: int | None) -> Report:
    """A function that tells whoever started us, once, the address or the error."""
    pending = [fd] if fd is not None else []

    def report(address: str | None, error: Exception | None) -> None:
        if pending:
            answer = {"address": address} if error is None else {"error": error_info(error)}
            with os.fdopen(pending.pop(), "wb") as pipe, contextlib.suppress(BrokenPipeError):
                pipe.write(msgspec.json.encode(answer) + b"\n")

    return report


if __name__ == "__main__":
    sys.exit(main())
