"""A log line is written without blocking, or dropped."""

from __future__ import annotations

import io
import logging
import os
import pty
import termios
from collections.abc import Iterator

import pytest

from tokenloom.ipc.process import log


@pytest.fixture
def ends() -> Iterator[list[int]]:
    opened: list[int] = []
    yield opened
    for fd in opened:
        os.close(fd)


def test_a_full_pipe_drops_the_line_and_the_next_reader_gets_later_ones(ends: list[int]) -> None:
    read_fd, write_fd = os.pipe()
    ends += [read_fd]
    with os.fdopen(write_fd, "w") as stream:
        os.set_blocking(write_fd, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(write_fd, bytes(4096))
        os.set_blocking(write_fd, True)
        log.write_line("lost", stream)
        os.set_blocking(read_fd, False)
        with pytest.raises(BlockingIOError):
            while os.read(read_fd, 1 << 16).strip(b"\0") == b"":
                pass
        log.write_line("naïve", stream)
        assert os.read(read_fd, 100).decode() == "naïve\n"


def test_a_closed_reader_or_a_full_disk_drops_the_line() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as stream, open("/dev/full", "w") as full:
        for each in (stream, full, None):
            log.write_line("lost", each)
    log.write_line("lost", stream)  # closed


def test_a_stopped_terminal_does_not_block(ends: list[int]) -> None:
    screen, terminal = pty.openpty()
    ends += [screen]
    with os.fdopen(terminal, "w") as stream:
        termios.tcflow(terminal, termios.TCOOFF)  # like Ctrl-S
        log.write_line("lost", stream)
        termios.tcflow(terminal, termios.TCOON)
        log.write_line("seen", stream)
        assert os.read(screen, 100) == b"seen\r\n"


def test_records_are_written_to_any_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handlers, level, propagate = log.logger.handlers[:], log.logger.level, log.logger.propagate
    try:
        log.configure("test", "warning")
        logging.getLogger("tokenloom.any").warning("a %s", "word")
        logging.getLogger("tokenloom.any").info("unsaid")
    finally:
        log.logger.handlers[:], log.logger.propagate = handlers, propagate
        log.logger.setLevel(level)
    assert stream.getvalue().endswith(" WARNING test: a word\n")
