"""SignalWatch: the signals that an operator sends to the supervisor.

    SIGTERM, SIGINT, SIGHUP   stop: the first drains, a second aborts
    SIGUSR1                   log the state
    SIGUSR2                   nothing

SIGHUP stays ignored if it was ignored at the start (nohup).
"""

from __future__ import annotations

import contextlib
import os
import signal

from ...ipc.errors import EngineDead

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StartInterrupted(EngineDead):
    """A signal ended the start; `exit_code` is 128 + its number, as of a command that the signal killed."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal while starting")
        self.exit_code = 128 + number


class SignalWatch:
    """Owns the signal handlers and the pipe that wakes the supervisor's loop. Create it in the main thread."""

    def __init__(self) -> None:
        self.num_stops = 0
        self.first_stop: signal.Signals | None = None
        self._is_state_requested = False
        self.fd, wakeup_fd = os.pipe()
        for fd in (self.fd, wakeup_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_state)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def clear(self) -> None:
        """Empty the pipe, so that a poll of `fd` blocks until the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 64)

    def take_state_request(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        is_requested, self._is_state_requested = self._is_state_requested, False
        return is_requested

    def _on_stop(self, number: int, frame: object) -> None:
        self.num_stops += 1
        self.first_stop = self.first_stop or signal.Signals(number)

    def _on_state(self, *_: object) -> None:
        self._is_state_requested = True
