"""A copy has every byte of its source, each of which was hashed; no piece is written before it was checked."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenloom.frontend.server.adapters.file_copy import PIECE_BYTES, WRITE_BYTES, copy_file
from tokenloom.frontend.server.adapters.finite_check import FiniteCheck
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.process.arena import PAGE
from tokenloom.ipc.process.page_file import WINDOW_BYTES, new_pages
from tokenloom.ipc.spec.adapters.tensor_header import TensorPlace, read_header
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


# ── values that are NaN or infinite ──────────────────────────────────────────────────────────────────────────────────

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def check(path: Path, unchecked: str = "") -> None:
    """Check a file in pieces, which follow each other from its begin to its end."""
    content, at = memoryview(path.read_bytes()), 0
    finite = FiniteCheck([place for place in read_header(path).values() if place.name != unchecked], "shown")
    for start, stop in finite.pieces(len(content), 16):
        assert start == at < stop <= start + 16
        finite.check(start, content[start:stop])
        at = stop
    assert at == len(content)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_is_found_in_any_tensor_of_a_file_of_several_types(tmp_path: Path, value: float) -> None:
    tensors = {f"t{i}": torch.ones(5 + i, dtype=TYPES[i // 2 % 4]) for i in range(8)}
    tensors["large"] = torch.full((4,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    path = tmp_path / "file"
    for name, tensor in tensors.items():
        for index in (0, len(tensor) - 1):
            bad = tensor.clone()
            bad[index] = value
            save_file(tensors | {name: bad}, path)
            with pytest.raises(RequestError, match=rf"^shown: element {index} of tensor {name} is NaN or infinite: "):
                check(path)
            check(path, unchecked=name)
    save_file(tensors, path)
    check(path)
