"""Signals to a whole process group or cgroup (Ctrl-C, a closed terminal, `systemctl kill`): only the supervisor handles
them; its children ignore them from their first instruction."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

GROUP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ignore_group_signals() -> None:
    """Ignore GROUP_SIGNALS, drop pending ones, and unblock them. A child calls this first."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


@contextmanager
def group_signals_held_back() -> Iterator[None]:
    """Block GROUP_SIGNALS while children are started: a child gets none before it calls `ignore_group_signals`, and
    this process gets those sent to it at the end of the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
