"""Signals that reach a whole process group or cgroup (Ctrl-C, a closed terminal, `systemctl kill`) and are for the
supervisor alone: the other processes ignore them, from the moment they exist."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

GROUP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ignore_group_signals() -> None:
    """To be called first in a child; what was held back until now is dropped."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


@contextmanager
def group_signals_held_back() -> Iterator[None]:
    """A child that is started inside the `with` gets none of them before it calls `ignore_group_signals`; this process
    gets its own at the end of the `with`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
