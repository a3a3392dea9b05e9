"""Tensors are read from any offset, many by one read, into memory that does not grow."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.process.arena import PAGE
from tokenloom.ipc.process.page_file import WINDOW_BYTES, PageFile
from tokenloom.ipc.spec.adapters.tensor_header import TensorPlace
from tokenloom.tests.support.direct_io import REFUSALS, refuse_direct
from tokenloom.workers.features.adapters.tensor_buffer import DTYPES, TensorBuffer


class Counting(PageFile):
    """A file that counts its reads."""

    num_reads = 0

    def read(self, pages: memoryview, offset: int) -> int:
        self.num_reads += 1
        return super().read(pages, offset)


def place(offset: int, count: int, dtype: str = "BF16") -> TensorPlace:
    num_bytes = count * DTYPES[dtype].itemsize
    return TensorPlace(name=f"t{offset}", dtype=dtype, shape=(count,), offset=offset, num_bytes=num_bytes)


def check(buffer: TensorBuffer, content: bytes, places: list[TensorPlace]) -> None:
    tensors = buffer.read(places)
    assert set(tensors) == {each.offset for each in places}
    for each in places:
        tensor = tensors[each.offset]
        assert tensor.dtype == DTYPES[each.dtype] and tuple(tensor.shape) == each.shape
        expected = content[each.offset : each.offset + each.num_bytes]
        assert tensor.view(torch.uint8).numpy().tobytes() == expected


@pytest.mark.parametrize("when", REFUSALS)
def test_tensors_of_any_offset_and_type_are_those_of_the_file(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = tmp_path / "a", random.Random(1)
    content = os.urandom(3 * WINDOW_BYTES + 4321)
    path.write_bytes(content)
    refuse_direct(monkeypatch, when)
    buffer = TensorBuffer()
    with PageFile(path) as file:
        buffer.open(file, "a")
        check(buffer, content, [place(1, 1), place(PAGE - 1, 1), place(3, 5, "F64"), place(PAGE - 4, 2, "F32")])
        check(buffer, content, [place(len(content) - 2, 1)])
        check(buffer, content, [place(0, len(content) // 4, "F32")])
        for _ in range(100):
            places, near = [], rng.random() < 0.8
            first = rng.randrange(len(content) - 2 * PAGE)
            for _ in range(rng.randrange(6)):
                start = first + rng.randrange(PAGE) if near else rng.randrange(len(content) - PAGE)
                dtype = rng.choice(list(DTYPES))
                most = (len(content) - start) // DTYPES[dtype].itemsize
                places.append(place(start, rng.randint(1, min(most, rng.choice([9, PAGE, 10**6]))), dtype))
            check(buffer, content, list({each.offset: each for each in places}.values()))


def test_layers_that_follow_each_other_share_a_read(tmp_path: Path) -> None:
    path, content = tmp_path / "a", os.urandom(WINDOW_BYTES)
    path.write_bytes(content)
    buffer = TensorBuffer()
    with Counting(path) as file:
        buffer.open(file, "a")
        for start in range(6, WINDOW_BYTES - 20_000, 20_000):
            check(buffer, content, [place(start, 5000), place(start + 10_000, 5000)])
        assert file.num_reads == 1
    path.write_bytes(content[::-1])
    with PageFile(path) as file:
        buffer.open(file, "a")
        check(buffer, content[::-1], [place(6, 5000)])


def test_memory_is_used_again_unless_it_is_large(tmp_path: Path) -> None:
    path, content = tmp_path / "a", os.urandom(4 * WINDOW_BYTES)
    path.write_bytes(content)
    buffer, sizes = TensorBuffer(2 * WINDOW_BYTES), []
    pages = buffer.pages
    with PageFile(path) as file:
        for count in (1, WINDOW_BYTES // 2, WINDOW_BYTES, 1, 2 * WINDOW_BYTES, 1, WINDOW_BYTES):
            buffer.open(file, "a")
            check(buffer, content, [place(0, count)])
            if len(buffer.pages) != len(pages):
                pages = buffer.pages
            assert buffer.pages is pages
            sizes.append(len(pages) // WINDOW_BYTES)
    assert sizes == [1, 1, 2, 2, 2, 2, 2]


def test_a_file_that_ends_within_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(PAGE + 10))
    buffer = TensorBuffer()
    with PageFile(path) as file:
        buffer.open(file, "the adapter")
        for start, count in ((PAGE + 8, 2), (PAGE, 6), (2 * PAGE, 1), (0, WINDOW_BYTES)):
            with pytest.raises(RequestError, match=f"the adapter: the file ends within tensor t{start}: load"):
                buffer.read([place(0, 1), place(start, count)] if start else [place(start, count)])
