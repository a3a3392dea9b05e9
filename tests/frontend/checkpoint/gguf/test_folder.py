"""A GGUF file gets a folder with config.json, index and tokenizer, once; others are refused in one line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenloom.frontend.checkpoint.gguf.folder import add_tokenizer, checkpoint_folder, gguf_in
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.checkpoint_digest import checkpoint_digest
from tokenloom.ipc.spec.config.gguf_index import read_gguf_index
from tokenloom.ipc.spec.config.weight_files import stored_tensors
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.mounts import needs_mounts, read_only_as_it_is

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    convert(tiny_checkpoint(folder / "model", "llama"), folder / "tiny.gguf", "F32")
    return folder / "tiny.gguf"


def rewritten(path: Path, to: Path, **changed: Any) -> Path:
    """Write the header of a file again, without vocabulary, with other metadata (None: without), and zeros."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(to, "llama")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    for name, value in (fields | changed).items():
        if name == "general.architecture" and value == "llama":
            continue
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kinds[type(value)](name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.zeros(tensor.data.shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_the_folder_is_made_once_for_a_file(tiny: Path, tmp_path: Path) -> None:
    mine = shutil.copy2(tiny, tmp_path / "mine.gguf")
    folder = checkpoint_folder(mine)
    (folder / "mark").touch()
    assert checkpoint_folder(mine) == folder and (folder / "mark").exists()
    (tmp_path / "link.gguf").symlink_to(mine)
    assert checkpoint_folder(tmp_path / "link.gguf") == folder
    assert (folder / "00001.gguf").resolve() == mine.resolve()
    assert not [path for path in folder.parent.iterdir() if path != folder], "nothing else is left"
    os.utime(mine, ns=(1, 1))
    assert checkpoint_folder(mine) != folder, "it may be another file"


def test_the_same_file_at_another_place_has_the_same_digest(tiny: Path, tmp_path: Path) -> None:
    there = shutil.copy(tiny, tmp_path / "elsewhere.gguf")
    here, other = checkpoint_folder(tiny), checkpoint_folder(there)
    assert here != other and checkpoint_digest(here) == checkpoint_digest(other)
    third = checkpoint_folder(rewritten(tiny, tmp_path / "zeros.gguf"))
    assert checkpoint_digest(third) != checkpoint_digest(here)


def test_a_model_in_parts_is_one(tiny: Path, tmp_path: Path) -> None:
    whole = read_gguf_index(checkpoint_folder(tiny))
    reader = gguf.GGUFReader(tiny)
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"model-0000{number}-of-00002.gguf", "llama")
        for name, field in reader.fields.items() if number == 1 else ():
            if name.startswith("llama."):
                value = field.contents()
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
        for i, tensor in enumerate(reader.tensors):
            if i % 2 == number % 2:
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = tmp_path / "model-00001-of-00002.gguf"
    assert gguf_in(tmp_path) == first
    joint = read_gguf_index(checkpoint_folder(first))
    assert whole is not None and joint is not None and joint.keys() == whole.keys()
    assert {each.file for each in joint.values()} == {"00001.gguf", "00002.gguf"}
    assert checkpoint_folder(tmp_path / "model-00002-of-00002.gguf") == checkpoint_folder(first)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(
        ConfigError, match=r"1 of its 2 parts are missing, model-00002-of-00002.gguf and on: fetch them"
    ):
        checkpoint_folder(first)


def test_a_folder_with_one_gguf_file_is_that_file(tiny: Path, tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None
    for name in ("a-Q4_0.gguf", "mmproj-a.gguf"):
        shutil.copy(tiny, tmp_path / name)
    assert gguf_in(tmp_path) == tmp_path / "a-Q4_0.gguf"
    shutil.copy(tiny, tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files, a-Q4_0.gguf and others: give the path of one"):
        gguf_in(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert gguf_in(tmp_path) is None, "a checkpoint of another form"
    assert gguf_in(checkpoint_folder(tiny)) is None, "a folder of ours"


def test_all_tensors_count(tiny: Path) -> None:
    tensors = stored_tensors(checkpoint_folder(tiny))
    assert {each.dtype for each in tensors.values()} == {"F32"}
    assert sum(each.num_bytes for each in tensors.values()) == sum(t.n_bytes for t in gguf.GGUFReader(tiny).tensors)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported in GGUF, known are .*llama.*: take"),
        ({"general.architecture": "evil\nline"}, r"architecture 'evil\\nline' is not supported"),
    ],
)
def test_metadata_that_cannot_be_served_are_named(
    changed: dict[str, Any], words: str, tiny: Path, tmp_path: Path, cache: Path
) -> None:
    path = rewritten(tiny, tmp_path / "other.gguf", **changed)
    with pytest.raises(ConfigError, match=words) as caught:
        checkpoint_folder(path)
    assert (
        str(path) in str(caught.value)
        and "\n" not in str(caught.value)
        and not list((cache / "tokenloom" / "gguf").iterdir())
    )


def test_without_a_cache_folder_the_mend_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot keep what is made for .*tiny.gguf \(.*: set XDG_CACHE_HOME to a"):
        checkpoint_folder(tiny)
    with pytest.raises(ConfigError, match=r"/file/gguf/\w+ cannot be written either \(.*: set XDG_CACHE_HOME to a"):
        checkpoint_folder(tiny, tmp_path / "file")


def test_a_cache_that_cannot_be_written_is_replaced_by_the_run_directory(
    tiny: Path, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = checkpoint_folder(tiny)
    shutil.rmtree(cache)
    cache.touch()
    own = checkpoint_folder(tiny, tmp_path / "run")
    assert own == tmp_path / "run" / "gguf" / cached.name and checkpoint_folder(tiny, tmp_path / "run") == own
    assert checkpoint_digest(own) and stored_tensors(own)
    (line,) = {record.getMessage() for record in caplog.records}
    assert str(tiny) in line and str(cache) in line and "each start makes it again: set XDG_CACHE_HOME to" in line


def test_a_folder_of_before_is_used_though_nothing_can_be_written_now(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = checkpoint_folder(tiny)

    def refuse(**options: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert checkpoint_folder(tiny, tmp_path / "run") == made and not caplog.records


@needs_mounts
@pytest.mark.timeout(120)
def test_a_tokenizer_goes_to_the_run_directory_if_its_folder_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(DEMO_FOLDER, tmp_path / "demo.gguf", "Q8_0", pre="gpt-2")
    folder = checkpoint_folder(tmp_path / "demo.gguf")
    program = (
        "import sys; from pathlib import Path; from tokenloom.frontend.checkpoint.gguf.folder import add_tokenizer\n"
        "print(add_tokenizer(*map(Path, sys.argv[1:])))"
    )
    command = [*read_only_as_it_is(folder), sys.executable, "-P", "-c", program, str(folder), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, cwd="/")
    own = tmp_path / "run" / "gguf" / f"{folder.name}-tokenizer"
    assert done.stdout.strip() == str(own) and "Read-only file system" in done.stderr
    assert add_tokenizer(folder) == folder and not caplog.records, "a folder that can be written"
    mine, cached = Tokenizer.load(own), Tokenizer.load(folder)
    assert mine is not None and cached is not None
    assert mine.encode("The capital of France") == cached.encode("The capital of France")
