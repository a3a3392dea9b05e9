"""A copy has every byte of its source, each of which was hashed; no piece is written before it was checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from tokenloom.frontend.adapters.file_copy import PIECE_BYTES, WRITE_BYTES, copy_file
from tokenloom.frontend.adapters.finite_check import FiniteCheck
from tokenloom.ipc.adapters.tensor_header import TensorPlace
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.process.arena import PAGE
from tokenloom.ipc.process.page_file import WINDOW_BYTES, new_pages
from tokenloom.tests.support.direct_io import REFUSALS, refuse_direct

SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, PIECE_BYTES, 2 * PIECE_BYTES + 1]
SIZES += [WRITE_BYTES - 1, WRITE_BYTES, WRITE_BYTES + 1, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1]


@pytest.mark.parametrize("when", REFUSALS)
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_copied_and_hashed(tmp_path: Path, size: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch, when)
    source, target, num_pauses = tmp_path / "a", tmp_path / "b", []
    source.write_bytes(os.urandom(size))
    content = hashlib.sha256()
    copy_file(source, target, content=content, pause=lambda: num_pauses.append(1))
    assert target.read_bytes() == source.read_bytes()
    assert content.digest() == hashlib.sha256(source.read_bytes()).digest()
    assert len(num_pauses) == -(-size // PIECE_BYTES)


@pytest.mark.parametrize("start", [8, PAGE - 8, 12_345])
def test_pieces_that_begin_within_a_page_are_copied_and_checked(tmp_path: Path, start: int) -> None:
    """The pieces of tensors begin where the file's header ends."""
    numbers = np.random.default_rng(1).standard_normal(2 * WRITE_BYTES // 4 + 1, np.float32)
    place = TensorPlace(name="t", dtype="F32", shape=numbers.shape, offset=start, num_bytes=numbers.nbytes)
    source, pages = tmp_path / "a", new_pages(WINDOW_BYTES)
    for _ in range(2):  # in the same memory
        source.write_bytes(os.urandom(start) + numbers.tobytes())
        copy_file(source, tmp_path / "b", FiniteCheck([place], "a"), pages=pages)
        assert (tmp_path / "b").read_bytes() == source.read_bytes()
    numbers[-1] = np.inf
    source.write_bytes(bytes(start) + numbers.tobytes())
    with pytest.raises(RequestError, match=f"element {len(numbers) - 1} of tensor t is NaN or infinite"):
        copy_file(source, tmp_path / "b", FiniteCheck([place], "a"), pages=pages)


def test_a_source_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(3 * PIECE_BYTES))
    with pytest.raises(RequestError, match="a became shorter while it was copied: load the adapter again"):
        copy_file(source, tmp_path / "b", pause=lambda: os.truncate(source, PIECE_BYTES))
