"""`engine-launch chat`: a conversation in the terminal.

readline edits lines and keeps a history. A backslash at the end of a line continues it, and pasted text is one turn;
Ctrl-C stops the response, not the chat; Ctrl-D exits. A line that starts with a slash is a command.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from ...ipc.errors import RequestError, TokenloomError
from ...ipc.messages.client import ChatMessage
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.spec.config.cache_folder import cache_folder, private_cache
from .attach import add_engine_choice, add_sampling, open_engine, sampling_params
from .attached import Attached, End

DESCRIPTION = "Chat with the model. /help lists the commands; Ctrl-C stops a response, Ctrl-D exits."
EXAMPLES = [
    "",
    "Qwen/Qwen3-0.6B --system 'Be brief.'",
    "http://10.0.0.7:8000",
    "tcp://10.0.0.7:5555 --key-file engine.key",
]
MAX_TOKENS = 4096  # of an answer, which a small model may never end
HISTORY_FILE = "chat_history"  # in the cache folder; none if that cannot be written
MAX_HISTORY_LINES = 2000

HELP = """/reset            start a new conversation
/params           show the sampling parameters
/params NAME=X …  change them: /params temperature=0 max_tokens=200
/system TEXT      start a new conversation with this system message
/stats            tokens and times of the last response
/exit             exit, as Ctrl-D"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_sampling(parser, MAX_TOKENS)
    add_engine_choice(parser, takes_word=True)


def run(arguments: argparse.Namespace) -> int:
    with open_engine(arguments) as engine, _line_editing():
        print(f"{engine.model} · /help for commands")
        params = sampling_params(arguments, engine.sampling_defaults, MAX_TOKENS)
        show = partial(print, end="", flush=True)
        ChatSession(engine, params, arguments.system, input, show).run()
    return 0


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Give `input` line editing and a history, if Python has readline and the input is a terminal."""
    try:
        import readline
    except ImportError:
        yield
        return
    if sys.stdin.isatty():
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one turn
        with contextlib.suppress(OSError, RuntimeError):
            readline.read_history_file(cache_folder() / HISTORY_FILE)
    try:
        yield
    finally:
        if sys.stdin.isatty():
            readline.set_history_length(MAX_HISTORY_LINES)
            with contextlib.suppress(OSError, RuntimeError):
                readline.write_history_file(private_cache() / HISTORY_FILE)


@dataclass(eq=False)
class ChatSession:
    """Conversation in a terminal: its turns and sampling parameters. `_read(prompt)` reads a line, `_show` prints."""

    _engine: Attached
    _params: SamplingParams
    _system: str | None
    _read: Callable[[str], str]
    _show: Callable[[str], None]
    _stats: str = "no response yet"

    def __post_init__(self) -> None:
        self._begin(self._system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._turns = [] if system is None else [ChatMessage("system", system)]

    def run(self) -> None:
        """Handle turns until the input ends or /exit."""
        while not self._take_turn():
            pass

    def _take_turn(self) -> bool:
        """Read and handle a line; return True to end the chat."""
        try:
            line = self._read_turn()
            if line.startswith("/") and line != "/exit":
                self._command(line)
            elif line.strip() and line != "/exit":
                self._respond(line)
        except EOFError:
            self._show("\n")
            return True
        except KeyboardInterrupt:  # while reading a line, or just after the end of a response
            self._show("\n")
            return False
        return line == "/exit"

    def _read_turn(self) -> str:
        lines = [self._read("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read("… "))
        return "\n".join(lines)

    def _respond(self, line: str) -> None:
        self._turns.append(ChatMessage("user", line))
        begun_at = time.monotonic()
        first_at = 0.0
        text = ""
        num_pieces = 0
        end: End | None = None
        answer = self._engine.stream(self._turns, self._params)
        try:
            while end is None:
                try:
                    piece = next(answer)
                except StopIteration as stop:
                    end = stop.value
                    break
                first_at = first_at or time.monotonic()
                num_pieces += 1
                text += piece
                self._show(piece)
            if end.reason == "length":
                self._show(f" [cut after {end.num_tokens} tokens: /params max_tokens=N allows more]")
        except KeyboardInterrupt:
            answer.close()
            self._show(" [stopped]")
        except TokenloomError as error:
            self._show(f"[{error}]")
        self._show("\n")
        if not text:  # no response: drop the turn
            self._turns.pop()
            return
        self._turns.append(ChatMessage("assistant", text))
        took_s = time.monotonic() - begun_at
        num_tokens = num_pieces if end is None else end.num_tokens
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
            self._show(HELP + "\n" if name == "/help" else f"{name} is not a command; the commands are:\n{HELP}\n")

    def _change(self, rest: str) -> None:
        """Apply `NAME=X …` to the sampling parameters, if all are valid, and show them; X is JSON, or else text."""
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
    except (msgspec.DecodeError, RecursionError):
        return name, value
