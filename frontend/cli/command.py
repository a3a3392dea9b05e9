"""Command: one subcommand of engine-launch, with its help, arguments and function.

`COMMANDS` lists them. The module of a command, `NAME.py` here or in a sub-folder, is imported only when the command
runs: shell completion and a `status` probe must not wait for the imports of other commands.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ...ipc.errors import TokenloomError
from ..checkpoint.downloads.hub_name import not_of_the_hub
from ..launcher.options.parser import OptionParser, discard_output

COMMANDS = {  # description by name
    "chat": "chat with the model in the terminal",
    "complete": "continue a text",
    "batch": "run the requests of an OpenAI batch file",
    "pull": "fetch a model of the hub",
    "ls": "list the models on this machine",
    "show": "show what a model is, and if it fits",
    "form": "show how a model writes thoughts and calls",
    "explain": "show where the prompts of two bodies part",
    "rm": "remove a fetched model",
    "launch": "run Claude Code or Codex with the engine",
    "ps": "list the engines that run",
    "status": "show model and state of a running engine",
    "reload-frontend": "upgrade the frontends, no stream is cut",
    "bench": "measure throughput, latency, start-up, …",
    "join": "lend this machine to an engine elsewhere",
    "keygen": "generate the keys of a tcp:// address",
    "completion": "print a completion script for a shell",
}
_FOLDERS = {  # of modules in sub-folders
    "launch": "agents.",
    "batch": "batches.",
    **dict.fromkeys(("pull", "ls", "show", "rm"), "models."),
    **dict.fromkeys(("ps", "status", "reload-frontend"), "running."),
}
SERVE = "serve"  # the command that may be left out
GATEWAY = "gateway"  # serve without a model of its own
ALL_COMMANDS = {
    SERVE: "serve a model, by default over HTTP on port 8000",
    GATEWAY: "serve the model of engines elsewhere: --cores",
    **COMMANDS,
}


@dataclass(frozen=True)
class Command:
    """The parts of a command's module; `run` gets the parsed arguments and returns the exit code."""

    name: str
    description: str
    examples: Sequence[str]  # arguments after `engine-launch NAME`
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    takes_rest: bool = False  # the words after -- are `rest` of the arguments, and those of another program

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.description = self.description
        parser.epilog = list_examples(f"engine-launch {self.name} {example}" for example in self.examples)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        self.add_arguments(parser)

    def main(self, argv: Sequence[str]) -> int:
        """Parse `argv`, run the command and return its exit code: after an error 2 if it is the caller's, else 1; 1 if
        the reader of the output has ended; 130 for Ctrl-C."""
        parser = OptionParser(prog=f"engine-launch {self.name}")
        self.configure(parser)
        num_own = len(argv)
        if self.takes_rest and "--" in argv:
            num_own = list(argv).index("--")
        arguments = parser.parse_args(argv[:num_own])
        if num_own < len(argv):
            arguments.rest = [*arguments.rest, *argv[num_own + 1 :]]
        try:
            code = self.run(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            discard_output()
            return 1
        except KeyboardInterrupt:
            return 130
        except (OSError, ValueError, TokenloomError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.filename:
                reason = f"{error.filename}: {error.strerror}"
            print(f"engine-launch {self.name}: {reason}", file=sys.stderr)
            return 2 if isinstance(error, (OSError, ValueError)) else 1


def list_examples(lines: Iterable[str]) -> str:
    return "\n  ".join(["examples:", *(line.rstrip() for line in lines)])


def list_commands(text_by_name: Mapping[str, str]) -> str:
    """Format a help line for each command or benchmark."""
    width = max(map(len, text_by_name))
    return "\n".join(f"  {name:{width}}  {text}" for name, text in text_by_name.items())


def list_in_columns(text_by_name: Mapping[str, str]) -> str:
    """Format the commands in two columns, down the first one first."""
    commands = [*text_by_name.items()]
    height = (len(commands) + 1) // 2
    first = list_commands(dict(commands[:height])).splitlines()
    second = list_commands(dict(commands[height:])).splitlines()
    width = max(map(len, first))
    pairs = zip_longest(first, second, fillvalue="")
    return "\n".join(f"{left:{width}}{right}".rstrip() for left, right in pairs)


def load_command(name: str) -> Command:
    """Import the module of a command and return its Command."""
    module = importlib.import_module(f".{_FOLDERS.get(name, '')}{name.replace('-', '_')}", __package__)
    takes_rest = getattr(module, "TAKES_REST", False)
    return Command(name, module.DESCRIPTION, module.EXAMPLES, module.add_arguments, module.run, takes_rest)


def unknown_command(name: str) -> str:
    """Return the error message for a first argument that is neither a command nor a model."""
    if (of_ollama := not_of_the_hub(name)) is not None:
        return of_ollama
    if "/" in name:
        return (
            f"{name} is neither a folder, a GGUF file nor a hub id of the form owner/name: check the path of the model"
        )
    close = difflib.get_close_matches(name, ALL_COMMANDS, 1)
    mend = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(ALL_COMMANDS)};"
    forms = "a folder, a GGUF file, a hub id of the form owner/name, or demo"
    return f"{name} is not a command: {mend} a model to serve is {forms}"
