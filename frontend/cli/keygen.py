"""`engine-launch keygen FILE`: generates the keys of a tcp:// address."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...ipc.sockets.keys import Keys

DESCRIPTION = "Write a key file for --key-file and Client(key_file=…). Everyone with the file may use the engine."
EXAMPLES = ["engine.key"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write, readable only by you")


def run(arguments: argparse.Namespace) -> int:
    Keys.generate().save(arguments.file)
    print(f"{arguments.file}: give it to the engine as --key-file, and to each client as key_file")
    return 0
