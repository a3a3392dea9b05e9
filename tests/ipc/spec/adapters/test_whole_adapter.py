"""An adapter as one blob is known by its digest, which covers all that changes its meaning and nothing else."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.adapters import digest
from tokenloom.ipc.spec.adapters.adapter_config import CONFIG_NAME
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.ipc.spec.adapters.tensor_header import TENSORS_NAME
from tokenloom.ipc.spec.adapters.whole_adapter import PIECE_BYTES, WholeAdapter, unpack
from tokenloom.tests.support.adapter_bytes import linear_pair, write_adapter_bytes


def test_file_of_several_pieces_is_read_whole(tmp_path: Path) -> None:
    folder = write_adapter_bytes(tmp_path, linear_pair("x", 8, digest.PIECE_BYTES // 16, 8))
    content = (folder / TENSORS_NAME).read_bytes()
    assert len(content) > 2 * digest.PIECE_BYTES
    fields = {
        "r": 8, "lora_alpha": 16.0, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
        "target_parameters": [],
    }  # fmt: skip
    encoded = json.dumps(fields, separators=(",", ":")).encode()
    prefix = b"tokenloom-adapter-1" + len(encoded).to_bytes(8, "little") + encoded
    assert adapter_digest(folder) == hashlib.sha256(prefix + content).digest()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    pairs = linear_pair("x", 8, PIECE_BYTES // 16, 8)
    return write_adapter_bytes(tmp_path / "adapter", pairs, use_rslora=True, alpha_pattern={"x": 3.5})


def test_the_blob_has_the_adapters_digest_and_any_part_of_it_can_be_read(adapter: Path) -> None:
    blob, rng = WholeAdapter(adapter), random.Random(1)
    content = blob[0 : len(blob)]
    assert len(content) == len(blob) > PIECE_BYTES
    assert hashlib.sha256(content).digest() == adapter_digest(adapter)
    ends = [0, 1, 19, 27, 28, 200, 201, len(content) - 1, len(content), len(content) + 5]
    places = [(a, b) for a in ends for b in ends] + [(rng.randrange(300), rng.randrange(300)) for _ in range(300)]
    assert all(blob[a:b] == content[a:b] for a, b in places)


def test_unpacked_files_are_the_same_adapter(adapter: Path, tmp_path: Path) -> None:
    blob, pauses = WholeAdapter(adapter), list[int]()
    (tmp_path / "copy").mkdir()
    unpack(memoryview(blob[0 : len(blob)]), tmp_path / "copy", lambda: pauses.append(1))
    assert adapter_digest(tmp_path / "copy") == adapter_digest(adapter)
    assert (tmp_path / "copy" / TENSORS_NAME).read_bytes() == (adapter / TENSORS_NAME).read_bytes()
    assert len(pauses) >= 2


@pytest.mark.parametrize("content", [b"", b"tokenloom-adapter-1", b"other" * 20, b"tokenloom-adapter-1" + b"\0" * 40])
def test_another_blob_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RequestError, match="is damaged"):
        unpack(memoryview(content), tmp_path, lambda: None)


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_missing_file_is_refused(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    for read in (adapter_digest, WholeAdapter):
        with pytest.raises(RequestError, match=name):
            read(adapter)
