"""Files are read below one folder alone, and only regular ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tokenloom.frontend.server.sources.local_files import LocalFiles
from tokenloom.ipc.errors import RequestError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "sub folder").mkdir(parents=True)
    (root / "sub folder" / "ü.png").write_bytes(b"x" * 100)
    (root / "inside").symlink_to(root / "sub folder" / "ü.png")
    (root / "outside").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    (tmp_path / "root-beside").mkdir()
    (tmp_path / "root-beside" / "x").write_bytes(b"secret")
    return root


def read(root: Path | None, url: str, max_bytes: int = 1000) -> bytes:
    return b"".join(LocalFiles(None if root is None else str(root), max_bytes).read(url))


@pytest.mark.parametrize("path", ["sub%20folder/%C3%BC.png", "sub folder/ü.png", "inside", "./sub folder/../inside"])
def test_files_below_the_folder_are_read(root: Path, path: str) -> None:
    assert read(root, f"file://{root}/{path}") == b"x" * 100
    assert read(root, f"file://localhost{root}/{path}") == b"x" * 100


@pytest.mark.parametrize(
    "path", ["../secret", "..%2Fsecret", "outside", "up/secret", "../root-beside/x", "/etc/passwd", "", "missing/../.."]
)
def test_nothing_else_is(root: Path, path: str) -> None:
    url = f"file://{path}" if path.startswith("/") else f"file://{root}/{path}"
    with pytest.raises(RequestError) as caught:
        read(root, url)
    assert "secret" not in str(caught.value).replace(path, "")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file://other.host{root}/inside", "names the host other.host"),
        ("file://{root}/missing", "No such file"),
        ("file://{root}/pipe", "not a regular file"),
        ("file://{root}/sub folder", "not a regular file"),
        ("file://{root}/socket", "cannot be read"),
        ("file://{root}/%00", "not a valid path"),
        ("file://{root}/%ff", "not a valid path"),
        ("file://{root}/" + "x/" * 5000, "cannot be read|not a valid path"),
    ],
)
def test_what_is_no_file_is_refused_with_the_reason(root: Path, url: str, reason: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
        with pytest.raises(RequestError, match=reason):
            read(root, url.format(root=root))


def test_a_large_file_is_refused_by_its_size(root: Path) -> None:
    with pytest.raises(RequestError, match="has 100 bytes or more, at most 99"):
        read(root, f"file://{root}/inside", 99)


def test_without_a_folder_nothing_is_read(root: Path) -> None:
    with pytest.raises(RequestError, match="--allowed-local-media-path"):
        read(None, f"file://{root}/inside")


def test_no_descriptor_is_left(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("inside", "pipe", "outside", "missing"):
        for _ in range(3):
            try:
                read(root, f"file://{root}/{path}")
            except RequestError:
                continue
    assert len(os.listdir("/proc/self/fd")) == before
