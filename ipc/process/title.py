"""The name of this process in `ps`."""

from __future__ import annotations

import ctypes

_PR_SET_NAME = 15


def set_title(title: str) -> None:
    """Show `title` in `ps -o args`; without setproctitle, its first 15 bytes in `ps -o comm`."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15])
    else:
        setproctitle(title)
