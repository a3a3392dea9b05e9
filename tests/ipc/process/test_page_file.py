"""Whole pages reach a file and come back, whether or not the file system takes O_DIRECT."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenloom.ipc.process.arena import PAGE
from tokenloom.ipc.process.page_file import WINDOW_BYTES, PageFile, new_pages
from tokenloom.tests.support.direct_io import REFUSALS, is_direct, refuse_direct


@pytest.mark.parametrize("when", REFUSALS)
def test_pages_are_written_and_read(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch, when)
    pages, content = new_pages(3 * PAGE), os.urandom(3 * PAGE)
    pages[:] = content
    with PageFile(tmp_path / "a", os.O_RDWR | os.O_CREAT) as file:
        file.write(pages[PAGE:], PAGE)
        file.write(pages[:PAGE], 0)
        assert not is_direct(file.fd) or when == "never"
        pages[:] = bytes(len(pages))
        assert file.read(pages, 0) == 3 * PAGE and bytes(pages) == content
        assert file.read(pages[:PAGE], PAGE) == PAGE and bytes(pages[:PAGE]) == content[PAGE : 2 * PAGE]


@pytest.mark.parametrize("when", REFUSALS)
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_a_read_ends_with_the_file(size: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "a", os.urandom(size)
    path.write_bytes(content)
    refuse_direct(monkeypatch, when)
    pages = new_pages(2 * PAGE)
    with PageFile(path) as file:
        assert file.read(pages, 0) == size and bytes(pages[:size]) == content
        assert file.read(pages, 2 * PAGE) == 0
        assert file.read(pages[:PAGE], PAGE) == max(0, size - PAGE)
        assert bytes(pages[: max(0, size - PAGE)]) == content[PAGE:]


def test_memory_that_the_disk_cannot_take_is_read_through_the_cache(tmp_path: Path) -> None:
    path, content = tmp_path / "a", os.urandom(PAGE)
    path.write_bytes(content)
    part = new_pages(2 * PAGE)[1 : 1 + PAGE]
    with PageFile(path) as file:
        assert file.read(part, 0) == PAGE and bytes(part) == content


def test_other_errors_are_the_systems(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PageFile(tmp_path / "missing")
    (tmp_path / "a").touch()
    with PageFile(tmp_path / "a") as file, pytest.raises(OSError, match="Bad file descriptor"):
        file.write(new_pages(PAGE), 0)


@pytest.mark.parametrize("size", [1, PAGE, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1])
def test_new_pages_are_whole_and_zero(size: int) -> None:
    pages = new_pages(size)
    assert len(pages) % PAGE == 0 and 0 <= len(pages) - size < PAGE
    assert not any(pages)
