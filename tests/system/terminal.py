"""A program on its own pseudo-terminal: Ctrl-C is a key, and the drawn text is readable."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

DEADLINE_S = 30.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """A program on a terminal; leaving the `with` kills it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int = 100) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            # background jobs of a shell ignore SIGINT and their children inherit that, unlike at a terminal
            ["setsid", "--ctty", "--wait", "env", "--default-signal=INT", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd="/",
            env={**environment, "TERM": "xterm"},
        )
        os.close(theirs)
        self._unread = ""
        self.raw = ""  # all output, with control sequences

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, text: str) -> str:
        """Return all new output up to and including `text`, without colours and other control sequences."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._unread:
            has_more = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))[0]
            assert has_more, f"{text!r} does not come: {self._unread[-2000:]!r}"
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # Linux reports a closed slave side with EIO
                raise AssertionError(f"{text!r} does not come, the program has ended: {self._unread!r}") from None
            news = data.decode(errors="replace")
            self.raw += news
            self._unread = _CONTROL.sub("", self._unread + news)
        end = self._unread.index(text) + len(text)
        seen, self._unread = self._unread[:end], self._unread[end:]
        return seen

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)  # its session gets SIGHUP
        self.process.kill()
        self.process.wait(DEADLINE_S)
