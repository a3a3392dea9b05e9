"""The digest covers all that changes an adapter's meaning, and nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tokenloom.ipc.adapters.adapter_config import CONFIG_NAME
from tokenloom.ipc.adapters.digest import PIECE_BYTES, adapter_digest
from tokenloom.ipc.adapters.tensor_header import TENSORS_NAME
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.support.adapter_bytes import linear_pair, write_adapter_bytes


def write(folder: Path, size: int = 8, **config: object) -> Path:
    return write_adapter_bytes(folder, linear_pair("x", 8, size, 8), **config)


def test_digest_is_that_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a", inference_mode=True, lora_alpha=16)
    second = write(tmp_path / "b", lora_dropout=0.5, lora_alpha=16.0)
    assert adapter_digest(first) == adapter_digest(second)
    assert len(adapter_digest(first)) == 32


def test_each_byte_of_the_tensors_and_each_field_that_is_applied_counts(tmp_path: Path) -> None:
    digests = {adapter_digest(write(tmp_path))}
    for config in ({"r": 4}, {"lora_alpha": 2}, {"use_rslora": True}, {"rank_pattern": {"x": 8}}, {"use_dora": True}):
        digests.add(adapter_digest(write(tmp_path, **config)))
    write(tmp_path)
    content = bytearray((tmp_path / TENSORS_NAME).read_bytes())
    for place in range(0, len(content), 37):
        content[place] ^= 1
        (tmp_path / TENSORS_NAME).write_bytes(content)
        digests.add(adapter_digest(tmp_path))
        content[place] ^= 1
    assert len(digests) == 6 + len(range(0, len(content), 37))


def test_file_of_several_pieces_is_read_whole(tmp_path: Path) -> None:
    folder = write(tmp_path, PIECE_BYTES // 16)
    content = (folder / TENSORS_NAME).read_bytes()
    assert len(content) > 2 * PIECE_BYTES
    fields = {
        "r": 8, "lora_alpha": 16.0, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
        "target_parameters": [],
    }  # fmt: skip
    encoded = json.dumps(fields, separators=(",", ":")).encode()
    prefix = b"tokenloom-adapter-1" + len(encoded).to_bytes(8, "little") + encoded
    assert adapter_digest(folder) == hashlib.sha256(prefix + content).digest()


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / name).unlink()
    with pytest.raises(RequestError, match=name):
        adapter_digest(tmp_path)
