"""Files of weights are beside their index, and regular: nothing else is opened, since that could wait for ever."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.weight_files import INDEX_NAME, SINGLE_NAME, file_by_tensor, read_header


def write_index(folder: Path, name: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": name}}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/outside.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "weights.bin",
        "a\0.safetensors",
        None,
        5,
        ["x.safetensors"],
    ],
)
def test_an_index_names_files_beside_it_alone(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, name)
    with pytest.raises(ConfigError, match=rf"{INDEX_NAME} names the file .* beside it: fetch"):
        file_by_tensor(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    for name in ("model-2.safetensors", SINGLE_NAME):
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if kind == "device" else ".")
        with pytest.raises(ConfigError, match=f"{name} is no regular file"):
            read_header(path)
    with pytest.raises(ConfigError, match="is no regular file"):
        file_by_tensor(tmp_path)
    write_index(tmp_path, "model-2.safetensors")
    with pytest.raises(ConfigError, match="is no regular file"):
        file_by_tensor(tmp_path)


def test_a_file_with_a_name_too_long_is_missing_in_one_line(tmp_path: Path) -> None:
    write_index(tmp_path, "x" * 300 + ".safetensors")
    path = file_by_tensor(tmp_path)["b"]
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_header(path)


def test_a_link_to_a_file_is_one_as_in_the_hubs_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots"
    folder.mkdir()
    header = json.dumps({"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "blobs" / "b").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    (folder / "model-2.safetensors").symlink_to("../blobs/b")
    write_index(folder, "model-2.safetensors")
    assert list(read_header(file_by_tensor(folder)["b"])) == ["b"]
