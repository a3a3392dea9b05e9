"""OptionParser: argparse with one-line errors that name the option as typed, and the remedy."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ....ipc.errors import one_line
from ....ipc.params.public_struct import suggestion
from .options import Kind
from .vllm_options import json_or_same

USAGE_CODE = 2


def discard_output() -> None:
    """Discard everything that is still to be written to the standard output, after its reader has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class OptionParser(argparse.ArgumentParser):
    """Argument parser that exits with USAGE_CODE after an error."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self._typed: dict[str, str] = {}  # flag that was typed for each option

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options in `words`, as parse_args does. Flags may have `_` instead of `-`; a JSON option may be
        given key by key (--a.b 1).

        If an option with one value is given more than once, the last value counts, so that others may append to a
        command; a line on stderr reports it. `spellings` in the result: see _spellings."""
        written = [_with_dashes(word) for word in words]
        self._typed = self._spellings(written)
        options = self.parse_args(self._with_objects(written))
        options.spellings = self._typed
        for flag in self._given_again(written):
            print(f"{self.prog}: {flag} is given more than once: the last one counts", file=sys.stderr)
        return options

    def _spellings(self, words: Sequence[str]) -> dict[str, str]:
        """Return the flag that was typed for each option, which may be an alias; the last one counts."""
        flags = [word.partition("=")[0].partition(".")[0] for word in words]
        return {self._option_string_actions[flag].dest: flag for flag in flags if flag in self._option_string_actions}

    def _given_again(self, words: Sequence[str]) -> list[str]:
        """Return the flags, among those with one value, that `words` give more than once."""
        found = Counter(self._option_string_actions.get(word.partition("=")[0]) for word in words)
        found.pop(None, 0)
        return [
            action.option_strings[-1]
            for action, count in found.items()
            if count > 1 and action is not None and action.nargs not in ("+", "*")
        ]

    def _with_objects(self, words: Sequence[str]) -> list[str]:
        """Return the words with all `--option.key.key value` of an option replaced by one `--option=JSON` at the
        end."""
        others: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        rest = deque(words)
        while rest:
            word = rest.popleft()
            written, has_value, text = word.partition("=")
            flag, *path = written.split(".")
            if not path or flag not in self._option_string_actions or not all(path):
                others.append(word)
                continue
            if not has_value:
                text = rest.popleft() if rest and not rest[0].startswith("--") else "true"
            place = objects.setdefault(flag, {})
            for key in path[:-1]:
                place = place.setdefault(key, {})
                if not isinstance(place, dict):
                    self.error(f"{written} and a part of its name are both given: give one")
            if path[-1] in place:
                self.error(f"{written} is given more than once: give it once")
            place[path[-1]] = json_or_same(text)
        if twice := next((flag for flag in objects if flag in {word.partition("=")[0] for word in others}), None):
            self.error(f"{twice} and {twice}.{next(iter(objects[twice]))} are both given: give one")
        return [*others, *(f"{flag}={json.dumps(value)}" for flag, value in objects.items())]

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        if words != message:
            message = self._unknown(words.split())
        if (found := re.match(r"argument ([^\s/]+)\S*: (?=must )", message)) is not None:
            action = self._option_string_actions.get(found[1])
            flag = found[1] if action is None else self._typed.get(action.dest, found[1])
            message = f"{flag} {message[found.end() :]}"
        print(f"{self.prog}: {one_line(message)}", file=sys.stderr)
        raise SystemExit(USAGE_CODE)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or version. If the reader has ended (`| head`), discard the rest: otherwise Python would write it
        at its exit, and print an error."""
        super()._print_message(message, file)
        try:
            sys.stdout.flush()
        except OSError:
            discard_output()

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {words[0]!r}; {self.prog} --help lists what it takes"
        mend = suggestion(flag, [name for name in self._option_string_actions if name.startswith("--")])
        return f"unknown option {flag}{mend or f'; {self.prog} --help lists all'}"


def _with_dashes(word: str) -> str:
    """Return a word with each `_` in a flag's name replaced by `-`; keys after a dot are not changed."""
    name = re.match(r"--[^=.]*", word)
    return word if name is None else name[0].replace("_", "-") + word[name.end() :]


def value_parser(kind: Kind) -> Callable[[str], object]:
    """Return the function that argparse calls to parse an option's value (`type`). It raises ArgumentTypeError."""

    def parse(text: str) -> object:
        try:
            return kind.parsed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
