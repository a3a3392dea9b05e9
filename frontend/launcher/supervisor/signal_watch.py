"""SignalWatch: the signals that an operator sends to the supervisor.

    SIGTERM, SIGINT, SIGHUP   stop: the first drains, a second aborts
    SIGUSR1                   log the state
    SIGUSR2                   replace the frontends

SIGHUP stays ignored if it was ignored at the start (nohup).
"""

from __future__ import annotations

import contextlib
import os
import signal

from ....ipc.errors import EngineDead

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)


class StartInterrupted(EngineDead):
    """Error of a start that a signal has ended. `exit_code`: 128 + the signal's number, as for a command that the
    signal has killed."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal while starting")
        self.exit_code = 128 + number


class SignalWatch:
    """Handler of the signals. Owns the pipe to which the interpreter writes their numbers. Create it in the main
    thread."""

    def __init__(self) -> None:
        self.stops: list[int] = []  # stop signals so far
        self.fd, self._wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *REQUESTS):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # without a handler the number is not written

    def wake(self) -> None:
        """Wake a poller of `fd` without a signal, from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is full, and wakes already
            os.write(self._wakeup_fd, b"\0")

    def take_requests(self) -> set[int]:
        """Read new signals: append stop signals to `stops` and return the others."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self.fd, 64)
        self.stops += [number for number in numbers if number in STOP_SIGNALS]
        return {number for number in numbers if number in REQUESTS}
