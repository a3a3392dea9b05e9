"""The digest of weights follows their content, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from tokenloom.core.tiers.namespace import digest_weights, namespace_of_parts, new_namespace, read_secret
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import in_folder, new_spec

SPEC = new_spec()
OLD = 1_700_000_000  # a time long ago


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenloom" / "weight_digests.json"


def write_weights(path: Path, content: bytes) -> None:
    """Write a safetensors file with one tensor of bytes, named by its first one."""
    header = json.dumps({f"t{content[0]}": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + content)
    os.utime(path, (OLD, OLD))


def new_model(folder: Path, *contents: bytes) -> Path:
    files = {f"t{content[0]}": f"model-{number}.safetensors" for number, content in enumerate(contents)}
    for name, content in zip(files.values(), contents, strict=True):
        write_weights(folder / name, content)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def digest(folder: Path) -> str:
    return digest_weights(SPEC, str(folder)).hex()


def test_equal_content_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    one = new_model(tmp_path / "one", b"abc", b"def")
    two = new_model(tmp_path / "two", b"def", b"abc")
    shutil.copytree(one, tmp_path / "three")
    assert digest(one) == digest(two) == digest(tmp_path / "three")


def test_a_user_without_a_home_has_a_digest_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model(tmp_path / "model", b"abc")
    with_home = digest(model)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)  # the user has no entry
    assert digest_weights(in_folder(SPEC, tmp_path), str(model)).hex() == with_home
    assert (tmp_path / "weight_digests.json").exists()


def test_one_changed_byte_is_another_digest(tmp_path: Path) -> None:
    known = {digest(new_model(tmp_path / str(number), b"abc", bytes([100, number]))) for number in range(5)}
    assert len(known | {digest(new_model(tmp_path / "x", b"abc"))}) == 6


def test_blobs_of_the_hub_are_known_by_their_names(tmp_path: Path) -> None:
    plain = new_model(tmp_path / "plain", b"abc", b"def")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "commit"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in plain.iterdir():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / name)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    expected = digest(plain)
    assert digest(snapshot) == expected
    for blob in blobs.iterdir():
        if blob.read_bytes()[:1] != b"{":  # not the index
            blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    assert digest(snapshot) == expected, "the content was read"
    (snapshot / "model-0.safetensors").unlink()
    (snapshot / "model-0.safetensors").symlink_to(plain / "model-1.safetensors")
    assert digest(snapshot) != expected, "a link elsewhere counts by its content"


def test_digests_are_kept_until_a_file_changes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reads = new_model(tmp_path / "m", b"abc", b"def"), []
    read = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: reads.append(file) or read(file, kind))
    first = digest(folder)
    assert digest(folder) == first and len(reads) == 2 and len(json.loads(cache.read_text())) == 2
    write_weights(folder / "model-1.safetensors", b"dex")
    os.utime(folder / "model-1.safetensors", (OLD + 1, OLD + 1))
    assert digest(folder) != first and len(reads) == 3
    cache.write_text("[1, 2")
    digest(folder)
    cache.write_text('{"a": 5}')
    digest(folder)
    assert len(reads) == 7
    os.utime(folder / "model-0.safetensors")
    digest(folder)
    digest(folder)
    assert len(reads) == 9, "a file that is new is read again: it may change without another time"


def test_a_time_in_the_future_is_not_new(tmp_path: Path, cache: Path) -> None:
    folder = new_model(tmp_path / "m", b"abc")
    os.utime(folder / "model-0.safetensors", (time.time() + 366 * 86400,) * 2)
    digest(folder)
    assert len(json.loads(cache.read_text())) == 1


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_model(tmp_path / "m", b"abc")
    path = folder / "model-0.safetensors"
    read, count = hashlib.file_digest, [0]

    def read_and_change(file: object, kind: str) -> object:
        result = read(file, kind)  # type: ignore[arg-type]
        count[0] += 1
        if count[0] < 3:
            write_weights(path, b"abd")
            os.utime(path, (OLD + count[0],) * 2)
        return result

    monkeypatch.setattr(hashlib, "file_digest", read_and_change)
    changed = digest(folder)
    assert count[0] == 3 and changed == digest(new_model(tmp_path / "other", b"abd"))
    count[0] = -1000
    os.utime(path, (OLD + 50,) * 2)
    with pytest.raises(ConfigError, match="changes all the time"):
        digest(folder)


def test_weights_that_cannot_be_read_are_an_error_with_its_file(tmp_path: Path) -> None:
    folder = new_model(tmp_path / "m", b"abc", b"def")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1.safetensors.*No such file"):
        digest(folder)
    with pytest.raises(ConfigError, match="neither"):
        digest(tmp_path)


def test_dummy_weights_are_known_by_the_model(tmp_path: Path) -> None:
    dummy = msgspec.structs.replace(SPEC, config=EngineConfig(load_format="dummy"))
    other = msgspec.structs.replace(dummy, model=msgspec.structs.replace(SPEC.model, hidden_size=16))
    assert digest_weights(dummy, "/a") == digest_weights(dummy, "/b") != digest_weights(other, "/a")


def test_a_namespace_depends_on_weights_facts_secret_and_format() -> None:
    arguments = (bytes(32), b"facts", b"")
    found = {new_namespace(*arguments), new_namespace(b"1" * 32, b"facts", b"")}
    found |= {new_namespace(bytes(32), b"fact", b""), new_namespace(bytes(32), b"facts", b"s" * 16)}
    found |= {new_namespace(bytes(32), b"facts", b"t" * 16)}
    found |= {new_namespace(*arguments, version=2)}
    assert len(found) == 6 and all(len(each) == 32 for each in found)


def test_a_secret_is_long_and_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_secret(str(path)) == b"0123456789abcdef" and read_secret(None) == b""
    path.write_text("short")
    with pytest.raises(ConfigError, match="has 5 bytes, at least 16"):
        read_secret(str(path))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "none"))


def test_the_parts_of_a_block_on_each_host_have_names_of_their_own() -> None:
    whole, ranks = new_namespace(bytes(32), b"{}", b""), [Rank(pp=0, tp=tp) for tp in range(4)]
    assert namespace_of_parts(whole, ranks, 4) == whole, "blocks of one host keep their names"
    parts = [ranks[:2], ranks[2:], ranks[:1], ranks[1:2]]
    assert len({whole, *(namespace_of_parts(whole, part, 4) for part in parts)}) == 5
