"""LocalFiles: media in files below the folder that the operator allows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ....ipc.errors import RequestError
from ....ipc.shortages.failure import shortage_of
from .media_url import shown

READ_BYTES = 1 << 20


class LocalFiles:
    """Reader of regular files whose real path is below `root`; if `root` is None, of no files at all."""

    def __init__(self, root: str | None, max_bytes: int) -> None:
        self._root = None if root is None else Path(root).resolve()
        self._max_bytes = max_bytes

    def read(self, url: str) -> Iterator[bytes]:
        """Yield the content of a file: URL in parts. RequestError if the file may not or cannot be read, or is too
        large; Overloaded if a resource of this machine has run out."""
        fd = self._open(self._path_of(url), url)
        try:
            num_bytes = 0
            while part := os.read(fd, READ_BYTES):
                num_bytes += len(part)
                self._check_size(num_bytes, url)
                yield part
        finally:
            os.close(fd)

    def _path_of(self, url: str) -> Path:
        """Return the path of a file: URL, with links resolved. RequestError if it is invalid or not allowed."""
        if self._root is None:
            raise RequestError(
                f"{shown(url)}: this engine reads no files: send the file itself, or start the engine with "
                "--allowed-local-media-path"
            )
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise RequestError(f"{shown(url)} names the host {parts.netloc}: write file:///path")
            path = Path(os.path.realpath(unquote(parts.path, errors="strict")))
        except (ValueError, UnicodeError, OSError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{shown(url)} is not a valid path: {error}") from None
        self._check_place(path, url)
        return path

    def _open(self, path: Path, url: str) -> int:
        """Open a regular file and return its descriptor. Check its path again after opening, since links may have
        changed. RequestError if the file is not regular, not below the root, too large or cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
        except ValueError as error:
            raise RequestError(f"{shown(url)} is not a valid path: {error}") from None
        except OSError as error:
            what = f"{shown(url)} cannot be read"
            raise shortage_of(error, what) or RequestError(f"{what}: {error.strerror}: check the path") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise RequestError(f"{shown(url)} is not a regular file: give the path of an image or a clip")
            self._check_place(Path(os.readlink(f"/proc/self/fd/{fd}")), url)
            self._check_size(status.st_size, url)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_place(self, path: Path, url: str) -> None:
        if self._root is None or not path.is_relative_to(self._root):
            raise RequestError(f"{shown(url)} is not below --allowed-local-media-path: copy the file there")

    def _check_size(self, num_bytes: int, url: str) -> None:
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"{shown(url)} has {num_bytes} bytes or more, at most {self._max_bytes} are read: use a smaller file "
                "or raise --max-media-bytes"
            )
