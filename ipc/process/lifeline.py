"""The lifeline: a child exits when its parent ends. Its standard input is a pipe; only the parent has the write end.

A thread blocks on the read end, which the kernel closes however the parent ends. If the child's threads do not run,
because it is stopped (SIGSTOP, a debugger) or hangs with the GIL, a signal from the kernel ends it or, if it has to do
something before it exits, lets a stopped one continue.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

PARENT_IS_GONE = 113  # exit code
_PR_SET_PDEATHSIG = 1


def start_lifeline(before_exit: Callable[[], None] | None = None) -> None:
    """Exit this process at the end of its standard input, after `before_exit`, which must be quick and thread-safe.

    When the parent's thread that started this process ends, the kernel also sends SIGKILL, or with `before_exit`
    SIGCONT, so that a stopped process runs and can exit.
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
