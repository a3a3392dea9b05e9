"""`engine-launch chat`: a conversation in the terminal.

Lines are edited and remembered with readline. A line that ends in a backslash goes on in the next, and what is pasted
is one turn; Ctrl-C stops the answer, not the chat; Ctrl-D leaves. What starts with a slash is a command.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...ipc.errors import RequestError, TokenloomError
from ...ipc.messages.client import ChatMessage
from ...ipc.sampling_params import SamplingParams
from ..client.client import Client
from .attach import add_engine_choice, add_sampling, open_engine, sampling_of

DESCRIPTION = "Talk with the model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."
EXAMPLES = ["", "--address tcp://10.0.0.7:5555 --key-file engine.key", "--model Qwen/Qwen3-0.6B --system 'Be brief.'"]
HISTORY_FILE = Path("~/.cache/tokenloom/chat_history").expanduser()
MAX_HISTORY_LINES = 2000

HELP = """/reset            forget the conversation
/params           show the sampling parameters
/params NAME=X …  change them: /params temperature=0 max_tokens=200
/system TEXT      begin anew with this system message
/stats            tokens and times of the last answer
/exit             leave, as Ctrl-D does"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_sampling(parser, None)
    add_engine_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    with open_engine(arguments) as engine, _line_editing():
        print(f"{engine.info().model} · /help for commands")
        ChatSession(engine, sampling_of(arguments), arguments.system, input, _show).run()
    return 0


def _show(text: str) -> None:
    print(text, end="", flush=True)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing and history for `input`, where readline is there and the input is a terminal."""
    try:
        import readline
    except ImportError:
        yield
        return
    if sys.stdin.isatty():
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one turn
        with contextlib.suppress(OSError):
            readline.read_history_file(HISTORY_FILE)
    try:
        yield
    finally:
        if sys.stdin.isatty():
            readline.set_history_length(MAX_HISTORY_LINES)
            with contextlib.suppress(OSError):
                HISTORY_FILE.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(HISTORY_FILE)


@dataclass(eq=False)
class ChatSession:
    """The turns so far and what the next one does. `read` and `show` are the terminal."""

    _engine: Client
    _params: SamplingParams
    _system: str | None
    _read: Callable[[str], str]
    _show: Callable[[str], None]
    _stats: str = "no answer yet"

    def __post_init__(self) -> None:
        self._begin(self._system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._turns = [] if system is None else [ChatMessage("system", system)]

    def run(self) -> None:
        """Until the input ends or /exit."""
        is_over = False
        while not is_over:
            is_over = self._take_turn()

    def _take_turn(self) -> bool:
        """Read a line and do what it says; whether it was the last."""
        try:
            line = self._read_turn()
            if line.startswith("/") and line != "/exit":
                self._command(line)
            elif line.strip() and line != "/exit":
                self._answer(line)
        except EOFError:
            self._show("\n")
            return True
        except KeyboardInterrupt:  # of a line, or just after the end of an answer
            self._show("\n")
            return False
        return line == "/exit"

    def _read_turn(self) -> str:
        lines = [self._read("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read("… "))
        return "\n".join(lines)

    def _answer(self, line: str) -> None:
        self._turns.append(ChatMessage("user", line))
        begun_at, first_at, text = time.monotonic(), 0.0, ""
        try:
            for piece in self._engine.stream(self._turns, self._params):
                first_at = first_at or time.monotonic()
                text += piece
                self._show(piece)
        except KeyboardInterrupt:
            self._show(" [stopped]")
        except TokenloomError as error:
            self._show(f"[{error}]")
        self._show("\n")
        if not text:  # nothing was said: the turn is taken back
            self._turns.pop()
            return
        self._turns.append(ChatMessage("assistant", text))
        took_s = time.monotonic() - begun_at
        num_tokens = len(self._engine.tokenize(text))
        self._stats = (
            f"{num_tokens} tokens in {took_s:.2f} s, the first after {first_at - begun_at:.3f} s: "
            f"{num_tokens / took_s:.1f} tokens/s"
        )

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._begin(self._system)
        elif name == "/system":
            self._begin(rest or None)
        elif name == "/params":
            self._change(rest)
        elif name == "/stats":
            self._show(self._stats + "\n")
        else:
            self._show(HELP + "\n" if name == "/help" else f"{name} is unknown; these are known:\n{HELP}\n")

    def _change(self, rest: str) -> None:
        """`NAME=X …` with each X as JSON, or as text where it is none."""
        try:
            changes = dict(_pair(part) for part in rest.split())
            self._params = msgspec.convert(msgspec.to_builtins(self._params) | changes, SamplingParams)
        except (RequestError, msgspec.ValidationError) as error:
            self._show(f"{error}\n")
        shown = msgspec.to_builtins(self._params)
        self._show(" ".join(f"{key}={value}" for key, value in shown.items()) + "\n")


def _pair(part: str) -> tuple[str, object]:
    name, equals, value = part.partition("=")
    if not equals:
        raise RequestError(f"{part}: write NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
