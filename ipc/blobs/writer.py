"""BlobWriter: a blob while it is being written, in a temporary file of its folder."""

from __future__ import annotations

import contextlib
import hashlib
import os

from .folder import BlobFolder

MAX_STEP_BYTES = 16 << 20  # most bytes that are reserved in advance for a blob of unknown size


class BlobWriter:
    """Writer of one blob. It owns a temporary file; `close` removes the file unless it was published. If the process
    dies, the file has no lock, and a later writer removes it."""

    def __init__(self, folder: BlobFolder, size: int = 0) -> None:
        self.num_bytes = 0
        self._folder = folder
        self._hash = hashlib.sha256()
        self._reserved = 0
        self._part, self.fd = folder.create_part()
        try:
            self._reserve(size)
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`. Overloaded if folder or disk is full, RequestError if the blob exceeds the folder's limit."""
        end = self.num_bytes + len(data)
        if end > self._reserved:
            limit = self._folder.max_bytes
            self._reserve(max(end, min(end + MAX_STEP_BYTES, end + limit // 64, limit)))
        rest = memoryview(data)
        with self._folder.shortage_is_overload():
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        self._hash.update(data)
        self.num_bytes = end

    def digest(self) -> bytes:
        """Return the SHA-256 of the bytes so far."""
        return self._hash.digest()

    def publish(self) -> bool:
        """Rename the file to the blob's digest, so that others find it, and return True; False if the folder has that
        blob already."""
        self._reserve(self.num_bytes)
        return self._folder.publish(self._part, self.fd, self.digest().hex())

    def close(self) -> None:
        """Remove the temporary file, if it was not published."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # a file without a lock is removed when room is needed
                self._part.unlink()
            os.close(self.fd)
            self.fd = -1

    def _reserve(self, size: int) -> None:
        if size != self._reserved:
            self._folder.resize(self.fd, self._reserved, size)
            self._reserved = size
