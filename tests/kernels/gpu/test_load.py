"""If Triton cannot launch, the reason is known before anything is compiled or loaded."""

from __future__ import annotations

import subprocess

import pytest
from triton import knobs
from triton.runtime import driver

from tokenloom.kernels.gpu.load import launch_obstacle


class Driver:
    """A driver that builds its module at first use, like Triton's."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    @property
    def utils(self) -> object:
        if self._error is not None:
            raise self._error
        return object()


@pytest.mark.parametrize(
    ("error", "obstacle"),
    [
        (None, None),
        (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler."),
        (
            subprocess.CalledProcessError(1, ["gcc", "main.c"]),
            "CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1.",
        ),
    ],
)
def test_launch_obstacle_returns_tritons_error(
    error: Exception | None, obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert knobs.runtime.interpret and launch_obstacle() is None  # the interpreter launches nothing
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(driver, "_active", Driver(error))
    assert launch_obstacle() == obstacle
