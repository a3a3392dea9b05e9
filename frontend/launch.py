"""`engine-launch`: parses the command line, starts a supervisor and serves until a signal.

Exit codes: 0 after a clean stop, 2 for an invalid configuration, 1 if the engine died, 128 + the number of a signal
that ended the start.
LLM and AsyncLLM start the same command with the configuration in its environment. Such a private engine ends when its
standard input closes, and writes one line to its standard output: its addresses, or the error of its start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..ipc.errors import ConfigError, TokenloomError, error_info
from ..ipc.process import log
from ..ipc.process.descriptors import raise_descriptor_limit
from ..ipc.process.lifeline import start_lifeline
from ..ipc.process.title import set_title
from ..ipc.sockets.addresses import RunDirectory
from ..ipc.spec.config.engine_config import CONFIG_VARIABLE, EngineConfig
from .checkpoint.given_name import name_as_given
from .checkpoint.hub import is_model_name
from .checkpoint.resolve import resolve
from .checkpoint.start_report import PROGRAM_INTERVAL_S, ThrottledWriter, write_to_stderr
from .cli.command import (
    COMMANDS,
    GATEWAY,
    SERVE,
    load_command,
    unknown_command,
)
from .cli.serve import new_serve_parser
from .launcher.engine_record import EngineRecord
from .launcher.options.arguments import given_options
from .launcher.options.environment import check_environment
from .launcher.options.given import Given
from .launcher.options.nodes import join_words
from .launcher.options.options import as_given, log_ignored, new_config
from .launcher.supervisor.launcher import Launcher
from .launcher.supervisor.local_launcher import LocalLauncher
from .launcher.supervisor.signal_watch import StartInterrupted
from .launcher.supervisor.supervisor import Supervisor
from .listening.http_listeners import HttpListeners
from .state.folder import StateFolder

_WORDS = {SERVE: [], GATEWAY: [], "version": ["--version"], "help": ["--help"]}  # first words, with their flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, or else serve; return the exit code."""
    _open_standard_streams()
    if argv is None:
        _use_utf8()
        argv = sys.argv[1:]
    first = argv[0] if argv else ""
    if first in COMMANDS:
        return load_command(first).main(argv[1:])
    if first in _WORDS:
        has_http, is_gateway = first in (SERVE, GATEWAY), first == GATEWAY
        return serve([*_WORDS[first], *argv[1:]], has_http=has_http, is_gateway=is_gateway)
    if first and not first.startswith("-") and not is_model_name(first):
        print(f"engine-launch: {unknown_command(first)}", file=sys.stderr)
        return 2
    return serve(argv)


def _open_standard_streams() -> None:
    """Open closed standard streams (`<&-`) on /dev/null, so that no socket gets a descriptor from 0 to 2."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _use_utf8() -> None:
    """Restart Python in UTF-8 mode if the locale has another encoding: file names and texts are UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def serve(argv: Sequence[str], *, has_http: bool = False, is_gateway: bool = False) -> int:
    """Run an engine until it ends and return the exit code. If a program set the configuration in the environment, the
    options of `argv` do not count. `has_http`: serve HTTP even if no option names an address. `is_gateway`: --cores is
    required."""
    arguments = _parse(argv)
    set_title("tokenloom supervisor")
    raise_descriptor_limit()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # until the supervisor takes signals
    is_private = CONFIG_VARIABLE in os.environ
    supervisor: Supervisor | None = None
    state = StateFolder()
    options: dict[str, Given] = {}
    try:
        options = {} if is_private else given_options(arguments, has_http=has_http)
        if (words := join_words(options)) is not None:
            return load_command("join").main(words)
        config = _config_from_environment() if is_private else new_config(options)
        if is_gateway and config.cores is None:
            raise ConfigError("a gateway needs --cores: the --core-listen addresses of its engines")
        log.configure("supervisor", config.log_level)
        if not is_private:
            check_environment(config, os.environ)
        log_ignored(options)
        state.open(config.state_dir)
        supervisor = _start(config, state, is_private)
        supervisor.run()
    except KeyboardInterrupt:  # before the supervisor takes signals
        print("engine-launch: stopped by a signal while starting", file=sys.stderr)
        return 128 + signal.SIGINT
    except TokenloomError as error:
        if is_private and supervisor is None:
            _print_start_result({"error": error_info(error)})
        else:
            print(f"engine-launch: {as_given(str(error), options)}", file=sys.stderr)
        return _exit_code(error)
    finally:
        if supervisor is not None:
            supervisor.stop()
        state.close()
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the words of the command. A word without a flag is the model; it ends the program to give two models, or a
    model that a flag before it takes as one of its values."""
    parser = new_serve_parser()
    arguments = parser.parse(argv)
    if (named := arguments.named_model) is not None:
        if getattr(arguments, "model", named) != named:
            flag = next((word for word in reversed(argv[: argv.index(named)]) if word.startswith("-")), "")
            values = f", or {named} is a second value of {flag}, which takes one" if flag else ""
            parser.error(f"{named} and --model {arguments.model} are two models{values}: give one of them")
        arguments.model = named
    elif arguments.config is None and "model" not in arguments and argv and is_model_name(argv[-1]):
        taken = next((name for name, value in vars(arguments).items() if isinstance(value, list) and value[1:]), None)
        if taken is not None and getattr(arguments, taken)[-1] == argv[-1]:
            flag = f"--{taken.replace('_', '-')}"
            parser.error(f"{flag} takes {argv[-1]} as one of its values: name the model first, or with --model")
    return arguments


def _exit_code(error: TokenloomError) -> int:
    if isinstance(error, StartInterrupted):
        return error.exit_code
    return 2 if isinstance(error, ConfigError) else 1


def _config_from_environment() -> EngineConfig:
    return msgspec.json.decode(os.environ.pop(CONFIG_VARIABLE), type=EngineConfig)


def _start(config: EngineConfig, state: StateFolder, is_private: bool) -> Supervisor:
    """Start an engine and wait until it serves. A private one then prints its addresses for the program that started
    it, and ends when its standard input closes."""
    run_directory = RunDirectory.create(config.data_parallel_size)
    announce: Callable[[str], None] = _print_line
    if is_private:
        announce = (
            (lambda line: None)
            if config.log_level == "error"
            else ThrottledWriter(write_to_stderr, interval_s=PROGRAM_INTERVAL_S)
        )
    listeners = HttpListeners()
    try:
        listeners.open(config)  # first, so that a port in use fails at once
        if config.chat_template is not None:
            from .server.text.chat_template import check_template  # imports Jinja

            check_template(config)
        spec = resolve(config, run_directory)
        is_placed = config.distributed_executor_backend == "ray"
        launcher: Launcher = LocalLauncher(spec.environment(), is_placed=is_placed)
        if config.hosts > 1:
            from .launcher.hosts.hosts import Hosts

            launcher = Hosts(spec, launcher)
        supervisor = Supervisor(spec, run_directory, listeners, state.fds, launcher, announce)
    except BaseException:
        listeners.close()
        run_directory.remove()
        raise
    if is_private:
        start_lifeline(supervisor.remove_files)
    try:
        _start_processes(supervisor, config)
        _record(supervisor, config, run_directory, is_private=is_private)
        supervisor.publisher.announce_ready(spec.served_model_name)
    except BaseException:
        supervisor.stop()
        raise
    if is_private:
        _print_start_result({"addresses": supervisor.addresses, "http_address": supervisor.http_address})
    return supervisor


def _start_processes(supervisor: Supervisor, config: EngineConfig) -> None:
    """Start the processes and wait until they serve. ConfigError names the model as the operator gave it."""
    try:
        supervisor.start()
    except ConfigError as error:
        folder = Path(supervisor.spec.model_folder)
        raise ConfigError(name_as_given(str(error), config.model, folder)) from None


def _record(supervisor: Supervisor, config: EngineConfig, run_directory: RunDirectory, *, is_private: bool) -> None:
    record = EngineRecord(
        pid=os.getpid(),
        model=supervisor.spec.served_model_name,
        given_model=config.model,
        addresses=supervisor.addresses,
        http_address=supervisor.http_address,
        key_file=None if config.key_file is None else os.path.abspath(config.key_file),
        started_at=time.time(),
        is_private=is_private and config.listen is None,
    )
    record.write(run_directory.path)


def _print_line(line: str) -> None:
    log.write_line(line, sys.stdout)


def _print_start_result(result: dict[str, object]) -> None:
    """Write one line of JSON to standard output, for the ChildEngine of the program that started this engine."""
    _print_line(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    sys.exit(main())
