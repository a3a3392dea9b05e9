"""`engine-launch`: the command. Parses, starts a supervisor, serves until told to stop.

Exit codes: 0 after a clean stop, 2 for a configuration that cannot be served, 1 when the engine died.
LLM and AsyncLLM start the same command: the configuration is in the environment, a lifeline and a descriptor for the
answer are arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from ..ipc import log
from ..ipc.addresses import RunDirectory
from ..ipc.config import CONFIG_VARIABLE, EngineConfig
from ..ipc.errors import ConfigError, TokenloomError, error_info
from ..ipc.lifeline import start_lifeline
from ..ipc.title import set_title
from ..ipc.version import tokenloom_version
from .args import add_engine_arguments, engine_config
from .cli_command import COMMANDS, list_commands, list_examples, load_command, unknown_command
from .resolve import resolve
from .supervisor import Supervisor

Report: TypeAlias = Callable[[str | None, str | None, Exception | None], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, or run the command that the first argument names."""
    _open_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return serve(argv)
    if argv[0] not in COMMANDS:
        print(f"engine-launch: {unknown_command(argv[0])}", file=sys.stderr)
        return 2
    return load_command(argv[0]).main(argv[1:])


def _open_standard_streams() -> None:
    """A descriptor from 0 to 2 that was closed before (`<&-`) would become some socket's, and every child's."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def new_serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine-launch",
        usage="engine-launch [OPTION …]\n       engine-launch COMMAND --help",
        description="Serve a model: starts one frontend, one core and one worker per rank. Or run a command:\n\n"
        + list_commands(COMMANDS),
        epilog=list_examples(
            (
                "engine-launch",
                "engine-launch --model ./Qwen3-0.6B --http 8000",
                "engine-launch --model ./Qwen3-0.6B --tp 2 --listen tcp://0.0.0.0:5555 --key-file engine.key",
            )
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tokenloom {tokenloom_version()}")
    parser.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    add_engine_arguments(parser)
    return parser


def serve(argv: Sequence[str]) -> int:
    arguments = new_serve_parser().parse_args(argv)
    set_title("tokenloom supervisor")
    report = _report_to(arguments.ready_fd)
    try:
        config = _config(arguments)
        log.configure("supervisor", config.log_level)
        _serve(config, arguments.lifeline_fd, report)
    except TokenloomError as error:
        report(None, None, error)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _config(arguments: argparse.Namespace) -> EngineConfig:
    if arguments.ready_fd is not None:
        return msgspec.json.decode(os.environ.pop(CONFIG_VARIABLE), type=EngineConfig)
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
        report(supervisor.address, supervisor.http_address, None)
        supervisor.run()
    finally:
        supervisor.stop()


def _announce(line: str) -> None:
    log.write_line(line, sys.stdout)


def _report_to(fd: int | None) -> Report:
    """A function that tells whoever started us, once, the addresses or the error; without `fd` it is a person."""
    pending = [fd] if fd is not None else []

    def report(address: str | None, http_address: str | None, error: Exception | None) -> None:
        if pending:
            places = {"address": address, "http_address": http_address}
            answer = places if error is None else {"error": error_info(error)}
            with os.fdopen(pending.pop(), "wb") as pipe, contextlib.suppress(BrokenPipeError):
                pipe.write(msgspec.json.encode(answer) + b"\n")
        elif error is not None:
            print(f"engine-launch: {error}", file=sys.stderr)

    return report


if __name__ == "__main__":
    sys.exit(main())
