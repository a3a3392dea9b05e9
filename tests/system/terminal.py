"""A program at a pseudo-terminal of its own, as a person has it: Ctrl-C is a key, and what it draws is read."""

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
    """A context manager; the program is killed at its end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int = 100) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            # a shell's background jobs ignore Ctrl-C and pass that on; at a terminal nobody does
            ["setsid", "--ctty", "--wait", "env", "--default-signal=INT", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd="/",
            env={**environment, "TERM": "xterm"},
        )
        os.close(theirs)
        self._unread = ""
        self.raw = ""  # all that came, control sequences included

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, text: str) -> str:
        """All that is new, up to and with `text`; colours and the like are left out."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._unread:
            has_more = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))[0]
            assert has_more, f"{text!r} does not come: {self._unread[-2000:]!r}"
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # how Linux says that the program has closed its side
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
