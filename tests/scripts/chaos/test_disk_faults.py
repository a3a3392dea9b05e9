"""Faults of the disk tier's folder damage half of its files, and list it once however many there are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.scripts.chaos.disk_faults import DAMAGES, DiskFaults


class CountedFaults(DiskFaults):
    num_listings = 0

    def files(self) -> list[Path]:
        self.num_listings += 1
        return super().files()


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_strike_damages_half_of_the_files_and_lists_them_once(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "namespace" / "ab"
    folder.mkdir(parents=True)
    for number in range(200):
        (folder / f"{number:03}").write_bytes(b"%d" % number * 50)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    faults = CountedFaults(tmp_path, random.Random(1))
    assert faults.damage(kind) and faults.num_listings == 1
    changed = sum(not path.exists() or path.read_bytes() != content for path, content in before.items())
    assert 60 < changed <= 200 and 60 < faults.counts[kind] < 140


@pytest.mark.parametrize("kind", DAMAGES)
def test_files_that_a_full_disk_has_left_empty_are_passed_over(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "namespace" / "ab"
    folder.mkdir(parents=True)
    for number in range(20):
        (folder / f"{number:02}").touch()
    faults = DiskFaults(tmp_path, random.Random(1))
    assert faults.damage(kind) and not faults.counts and len(faults.files()) == 20
