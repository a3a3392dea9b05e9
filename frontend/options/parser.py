"""OptionParser: argparse, whose errors are one line that names the option as it was typed and the mend."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .options import Kind, meant

USAGE_CODE = 2


class OptionParser(argparse.ArgumentParser):
    """Exits with USAGE_CODE after an error."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """As parse_args; flags may be written with `_` for `-`."""
        parts = (word.partition("=") for word in words)
        flags = ((flag.replace("_", "-") if flag.startswith("--") else flag, *rest) for flag, *rest in parts)
        return self.parse_args(["".join(each) for each in flags])

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        if words != message:
            message = self._unknown(words.split())
        message = re.sub(r"^argument ([^\s/]+)\S*: (must be) ", r"\1 \2 ", message)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(USAGE_CODE)

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {words[0]!r}; {self.prog} --help lists what it takes"
        mend = meant(flag, [name for name in self._option_string_actions if name.startswith("--")])
        return f"unknown option {flag}{mend or f'; {self.prog} --help lists all'}"


def value_parser(kind: Kind) -> Callable[[str], object]:
    """What reads an option's value for argparse."""

    def parse(text: str) -> object:
        try:
            return kind.parsed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
