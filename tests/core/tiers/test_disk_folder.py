"""The folder of a disk source: which folders become ours, and that nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenloom.core.tiers.disk_folder import MARK, MARKER, DiskFolder
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.core.tiers.slots import NAMESPACE, disk_with, filled, key_of, load, open_disk

NAMESPACE_FOLDER = NAMESPACE.digest.hex()[:16]


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modes of everything below a folder, and the content of its files."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in [root, *root.rglob("*")]
    }


@pytest.mark.parametrize(
    "names",
    [
        ["tmp/thesis.tex"],
        [f"tmp/{key_of(1).hex()}"],
        ["thesis.tex"],
        [".lock", "thesis.tex"],
        [f"{NAMESPACE_FOLDER}/{key_of(1).hex()[:2]}/{key_of(1).hex()}"],
        [f"{NAMESPACE_FOLDER}/notes", "notes/a", ".lock"],
        [MARKER],
        [MARKER, ".lock", f"{NAMESPACE_FOLDER}/x"],
    ],
)
def test_a_folder_with_other_things_is_refused_and_left_as_it_is(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("precious")
    before = snapshot(tmp_path)
    source = open_disk(tmp_path, max_bytes=1)
    assert not source.state().is_open and source.store(filled([1, 2])) == [False, False]
    error = source.state().error
    assert str(tmp_path) in error and "holds other things" in error and "kv-blocks" in error
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("names", [[], ["lost+found/"], ["replica-1/"]])
def test_a_new_folder_becomes_ours_by_a_marker(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    source = open_disk(tmp_path)
    assert source.state().is_open and (tmp_path / MARKER).read_bytes().startswith(MARK)
    source.close()
    (tmp_path / "later.txt").write_text("somebody's")
    assert open_disk(tmp_path).state().is_open, "the marker decides"
    assert (tmp_path / "later.txt").read_text() == "somebody's"


def test_a_folder_of_an_earlier_release_is_taken_with_its_blocks(tmp_path: Path) -> None:
    source = disk_with(tmp_path, range(5))
    source.close()
    (tmp_path / MARKER).unlink()
    source = open_disk(tmp_path)
    assert load(source, range(5)) == [True] * 5 and (tmp_path / MARKER).exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match=rf"kv can be written by others \(mode {mode:o}\): chmod go-w"):
        DiskFolder(root)
    assert list(root.iterdir()) == []
    root.chmod(0o755)
    DiskFolder(root).close()


@pytest.mark.skipif(os.getuid() != 0, reason="a file can be given away by root alone")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to the user with number 12345"):
        DiskFolder(root)


@pytest.mark.parametrize("place", ["", "tmp", NAMESPACE_FOLDER, f"{NAMESPACE_FOLDER}/{key_of(1).hex()[:2]}"])
def test_no_link_is_followed(tmp_path: Path, place: str) -> None:
    root, victim = tmp_path / "kv", tmp_path / "victim"
    victim.mkdir()
    if place:
        open_disk(root).close()
        (root / place).parent.mkdir(exist_ok=True)
        if (root / place).is_dir():
            (root / place).rmdir()
    (root / place).symlink_to(victim)
    (victim / key_of(1).hex()).write_text("precious")
    source = open_disk(root)
    source.store(filled([1]))
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [(key_of(1).hex(), "precious")]
    assert source.state().error


def test_a_folder_that_takes_the_name_later_is_not_touched(tmp_path: Path) -> None:
    root, victim = tmp_path / "kv", tmp_path / "victim"
    source = disk_with(root, [1])
    root.rename(tmp_path / "moved")
    victim.mkdir()
    root.symlink_to(victim)
    assert source.store(filled([2])) == [True] and load(source, [1, 2]) == [True, True]
    assert list(victim.iterdir()) == []
