"""A copy has every byte of its source, each of which was hashed; no piece is written before it was checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tokenloom.frontend.adapters.file_copy import PIECE_BYTES, copy_file
from tokenloom.ipc.errors import RequestError


@pytest.mark.parametrize("size", [0, 1, 100_000, PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_every_byte_is_copied_and_hashed(tmp_path: Path, size: int) -> None:
    source, target, num_pauses = tmp_path / "a", tmp_path / "b", []
    source.write_bytes(os.urandom(size))
    content = hashlib.sha256()
    copy_file(source, target, content=content, pause=lambda: num_pauses.append(1))
    assert target.read_bytes() == source.read_bytes()
    assert content.digest() == hashlib.sha256(source.read_bytes()).digest()
    assert len(num_pauses) == -(-size // PIECE_BYTES)


def test_a_source_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(3 * PIECE_BYTES))
    with pytest.raises(RequestError, match="a became shorter while it was copied: load the adapter again"):
        copy_file(source, tmp_path / "b", pause=lambda: os.truncate(source, PIECE_BYTES))
