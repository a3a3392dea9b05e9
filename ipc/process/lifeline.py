"""How a child dies with its parent: its standard input is a pipe whose write end only the parent holds.

A thread blocks on the read end; the kernel closes the write end when the parent ends, however it ends. The thread
never wakes otherwise. A child whose threads stand still, because it was stopped (SIGSTOP, a debugger) or hangs in a
call that holds Python's lock, is ended by a signal of the kernel's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

PARENT_IS_GONE = 113  # the exit code, for whoever still looks
_PR_SET_PDEATHSIG = 1


def start_lifeline(before_exit: Callable[[], None] | None = None) -> None:
    """Exit this process at the end of its standard input, after `before_exit`, which must be quick and thread-safe.

    Without `before_exit` nothing is lost by SIGKILL, when the thread that started this process ends; with one, a
    stopped process is only told to go on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if before_exit is None else signal.SIGCONT)

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        try:
            if before_exit is not None:
                before_exit()
        finally:
            os._exit(PARENT_IS_GONE)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
