"""Header of an adapter's tensors: it is read without the tensors, and every damage has its own error."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.adapters.tensor_header import MAX_HEADER_BYTES, TensorPlace, read_header
from tokenloom.tests.support.adapter_bytes import header_of, tensor_file

TENSORS = {"x.lora_A.weight": ("F32", [2, 3]), "x.lora_B.weight": ("BF16", [4, 2])}
GOOD = tensor_file(header_of(TENSORS), 40)


def read(folder: Path, content: bytes) -> dict[str, TensorPlace]:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(content)
    return read_header(path)


def entry(start: int, end: int, shape: object = (2, 3), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def one_tensor(name: str, shape: object = (2, 3), dtype: object = "F32") -> bytes:
    return tensor_file({name: entry(0, 24, shape, dtype)}, 24)


def test_places_are_those_of_the_file(tmp_path: Path) -> None:
    a, b = read(tmp_path, GOOD).values()
    start = len(GOOD) - 40
    assert (a.name, a.dtype, a.shape, a.offset, a.num_bytes) == ("x.lora_A.weight", "F32", (2, 3), start, 24)
    assert (b.name, b.dtype, b.shape, b.offset, b.num_bytes) == ("x.lora_B.weight", "BF16", (4, 2), start + 24, 16)


def test_places_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"b": entry(24, 48), "a": entry(0, 24)}
    assert list(read(tmp_path, tensor_file(header, 48))) == ["a", "b"]


DAMAGES = {
    "overlap by 8 bytes": tensor_file({"a": entry(0, 24), "b": entry(16, 40)}, 40),
    "8 bytes before tensor b belong to none": tensor_file({"a": entry(0, 24), "b": entry(32, 56)}, 56),
    "8 bytes before tensor a belong to none": tensor_file({"a": entry(8, 32)}, 32),
    "has 20 bytes, shape [2, 3] of F32 takes 24": tensor_file({"a": entry(0, 20)}, 20),
    "its tensors end at byte": GOOD[:-1],
    "the file has": GOOD + b"x",
    "cannot be read": struct.pack("<Q", 12) + b'{"a": [1, 2}' + bytes(4),
    "its header has 0 bytes": b"\x01\x02",
    f"its header has {2**63} bytes": struct.pack("<Q", 2**63) + GOOD[8:],
    "holds no tensors": tensor_file({"__metadata__": {}}, 0),
    "is 'I8', an adapter holds F64, F32, F16, BF16": tensor_file({"a": entry(0, 6, dtype="I8")}, 6),
    "'../../etc/passwd' is no path of a tensor": one_tensor("../../etc/passwd"),
    "'a..b' is no path of a tensor": one_tensor("a..b"),
    "Expected `int` >= 0": one_tensor("a", shape=[-2, -3]),
    "length <= 8": one_tensor("a", shape=[1] * 4000),
    "<= 1125899906842624": tensor_file({"a": entry(0, 2**62)}, 24),
    "Expected `str`": one_tensor("a", dtype=5),
    "missing required field": tensor_file({"a": {"dtype": "F32"}}, 24),
    "Expected `object`": tensor_file([1, 2, 3], 24),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_each_damage_has_its_own_error(tmp_path: Path, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(tmp_path, DAMAGES[message])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_header_longer_than_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(8 + MAX_HEADER_BYTES + 100)
    with pytest.raises(RequestError, match=f"its header has {MAX_HEADER_BYTES + 1} bytes"):
        read_header(path)


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    with pytest.raises(RequestError, match="give the folder of a PEFT adapter"):
        read_header(path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(RequestError, match="may run code when read: save the adapter again as safetensors"):
        read_header(path)


def test_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    os.mkfifo(path)
    with pytest.raises(RequestError, match="is no file"):
        read_header(path)


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 41), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_refused_or_read_as_sound_places(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(GOOD)
    for place, byte in changes:
        content[place] = byte
    folder = tmp_path_factory.getbasetemp()
    try:
        places = list(read(folder, bytes(content)).values())
    except RequestError:
        return
    assert sum(place.num_bytes for place in places) == 40
    assert max(place.offset + place.num_bytes for place in places) == len(GOOD)
