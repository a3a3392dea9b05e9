"""File systems that refuse O_DIRECT, when a file is opened or at its first transfer."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest

REFUSALS = ("never", "at open", "at transfer")


def refuse_direct(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Let the system refuse O_DIRECT as one of REFUSALS says."""

    def unless(is_direct: Callable[..., bool], operate: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **keywords: Any) -> Any:
            if is_direct(*arguments):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return operate(*arguments, **keywords)

        return checked

    if when == "at open":
        monkeypatch.setattr(os, "open", unless(lambda path, flags, *_: bool(flags & os.O_DIRECT), os.open))
    elif when == "at transfer":
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, unless(lambda fd, *_: is_direct(fd), getattr(os, name)))


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
