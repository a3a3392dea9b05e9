"""Take pictures of the command line as SVG: an engine's start, and a chat with it.

    scripts/looks/screenshot_terminal.py OUT_FOLDER

Types into a tmux terminal like a person and lets rich draw the screen. Exits 0 with a message if tmux or rich is not
installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS, ROWS = 110, 36
PATIENCE_S = 60.0
SHELL = "bash-"  # its prompt starts so
LAUNCH = f"{sys.executable} -P -m tokenloom.frontend.launch"
TURNS = ("What is the capital of Peru?", "And of Norway?", "What is 2 plus 3?", "/stats", "/help")


class Terminal:
    """A separate tmux server with one window."""

    def __init__(self, folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        environment = {**os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        subprocess.run(
            [*self._tmux, "new-session", "-d", *size, "bash --norc --noprofile"],
            check=True,
            env=environment,
            cwd=folder,
        )

    def run(self, line: str) -> None:
        self._call("send-keys", "-l", line)
        self._call("send-keys", "Enter")

    def key(self, name: str) -> None:
        self._call("send-keys", name)

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._call("capture-pane", "-p").count(text) < times:
            if time.monotonic() > deadline:
                raise SystemExit(f"{text!r} does not come:\n{self._call('capture-pane', '-p')}")
            time.sleep(0.05)

    def picture(self, title: str, file: Path) -> None:
        from rich.console import Console
        from rich.text import Text

        shown = self._call("capture-pane", "-p", "-e").rstrip("\n")
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
            console.print(Text.from_ansi(shown))
            file.write_text(console.export_svg(title=title), encoding="utf-8")
        print(file)

    def close(self) -> None:
        self._call("kill-server")

    def _call(self, *arguments: str) -> str:
        return subprocess.check_output([*self._tmux, *arguments], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    try:
        import rich  # noqa: F401
    except ImportError:
        print("rich is not installed")
        return 0
    if shutil.which("tmux") is None:
        print("tmux is not installed")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder))
        try:
            take(terminal, out)
        finally:
            terminal.close()
    return 0


def take(terminal: Terminal, out: Path) -> None:
    """Write chat.svg, then start.svg: the chat's engine compiles the kernels, which the start must find compiled."""
    terminal.wait_for(SHELL)
    terminal.run(f'engine-launch() {{ {LAUNCH} "$@"; }}; clear')
    terminal.run("engine-launch chat --temperature 0")
    terminal.wait_for("/help for commands")
    for number, turn in enumerate(TURNS, start=2):
        terminal.run(turn)
        terminal.wait_for("\n>", number)
    terminal.picture("engine-launch chat", out / "chat.svg")
    terminal.run("/exit")
    terminal.wait_for(SHELL)
    terminal.run("clear; engine-launch --http 8000")
    terminal.wait_for("Ready at")
    terminal.picture("engine-launch --http 8000", out / "start.svg")
    terminal.key("C-c")


if __name__ == "__main__":
    sys.exit(main())
