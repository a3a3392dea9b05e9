"""Child processes of the blob tests: programs that import the store, and end by themselves with the test's pipe."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

IMPORTS = "import sys; from pathlib import Path; from tokenloom.ipc.blobs.store import BlobStore; "


def run(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    """Run a program to its end; return its output."""
    command = [*prefix, sys.executable, "-P", "-c", IMPORTS + code, *map(str, arguments)]
    return subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout


@contextlib.contextmanager
def started(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a program and wait for its first line; it is killed at the end, if it still runs."""
    command = [sys.executable, "-P", "-c", IMPORTS + code, *map(str, arguments)]
    with subprocess.Popen(command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
