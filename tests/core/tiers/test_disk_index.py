"""The index against a plain model: limits hold after each operation, and the oldest use goes first."""

from __future__ import annotations

import random

import msgspec
import pytest

from tokenloom.core.tiers.disk_index import DiskIndex, NoRoom, Reserved, Victim
from tokenloom.core.tiers.disk_scan import ScannedFile
from tokenloom.tests.core.tiers.slots import key_of
from tokenloom.tests.support.today import some

SIZE, NOW = 10, 1000


def scanned(number: int, stamp: int, owner: int = 0) -> ScannedFile:
    return ScannedFile(stamp, key_of(number), owner, SIZE, f"path of {number}")


class Model:
    """The content of an index: keys with their owners and bytes, the oldest use first."""

    def __init__(self, max_bytes: int, max_owned: int) -> None:
        self.max_bytes, self.max_owned = max_bytes, max_owned
        self.objects: list[tuple[bytes, int, int]] = []

    def bytes_of(self, owner: int | None = None) -> int:
        return sum(size for _, its, size in self.objects if owner in (None, its))

    def victim(self, owner: int, num_bytes: int) -> bytes | None:
        if owner and self.bytes_of(owner) + num_bytes > self.max_owned:
            return next(key for key, its, _ in self.objects if its == owner)
        return self.objects[0][0] if self.bytes_of() + num_bytes > self.max_bytes else None

    def remove(self, key: bytes) -> None:
        self.objects = [each for each in self.objects if each[0] != key]


@pytest.mark.parametrize("sizes", [(SIZE,), (SIZE, 3), (SIZE, 17, 3)])
@pytest.mark.parametrize("seed", some(range(20), 5))
def test_random_operations_agree_with_the_model(seed: int, sizes: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    index, model = DiskIndex(sizes, 125, quota=0.4), Model(125, 50)
    for _ in range(2000):
        number = rng.randrange(40)
        key, owner, size = key_of(number), number % 3, sizes[number % len(sizes)]
        draw = rng.random()
        if draw < 0.5 and index.owner_of(key) is None:
            while isinstance(reserved := index.reserve(owner, size), Victim):
                assert reserved.key == model.victim(owner, size) and index.owner_of(reserved.key) is None
                assert (reserved.key, reserved.owner, reserved.num_bytes) in model.objects
                model.remove(reserved.key)
                index.release(reserved.num_bytes)
            assert model.victim(owner, size) is None
            if rng.random() < 0.1:
                index.cancel(reserved)
            else:
                assert index.commit(key, reserved, 0)
                model.objects.append((key, owner, size))
        elif draw < 0.9:
            keys = [key_of(number + step * len(sizes)) for step in range(3)]
            held = {each: rest for each, *rest in model.objects}
            count = next((place for place, each in enumerate(keys) if each not in held), 3)
            assert index.contains(keys, size) == [each in held for each in keys]
            assert index.find(keys, size) == count and index.find(keys, size + 1) == 0
            for each in reversed(keys[:count]):
                its_owner, its_size = held[each]
                model.remove(each)
                model.objects.append((each, its_owner, its_size))
        elif (victim := index.discard(key)) is not None:
            index.release(victim.num_bytes)
            model.remove(key)
        assert len(index) == len(model.objects) and index.held_bytes == model.bytes_of() <= 125
        assert all(model.bytes_of(each) <= 50 for each in (1, 2))
        for each, its_owner, _ in model.objects:
            assert index.owner_of(each) == its_owner


def emptied(index: DiskIndex) -> list[Victim]:
    """Remove all that exceeds the limits or that one more object needs; return it in its order."""
    gone: list[Victim] = []
    while isinstance(victim := index.excess() or index.reserve(0, SIZE), Victim):
        gone.append(victim)
        index.release(victim.num_bytes)
    return gone


def test_files_of_other_namespaces_go_first_and_the_oldest_of_them_before_all() -> None:
    index = DiskIndex([SIZE], 65)
    index.add([scanned(1, 1)], is_foreign=False, now=NOW)
    stamps = (900, 2 * NOW, 500, 3 * NOW)  # those in the future are the oldest
    index.add([ScannedFile(stamp, key_of(5), 0, 15, str(stamp)) for stamp in stamps], is_foreign=True, now=NOW)
    assert [victim.path for victim in emptied(index)] == ["2000"] and index.held_bytes == 65
    index.commit(key_of(2), Reserved(0, SIZE, 0), 0)
    victims = [index.reserve(0, SIZE) for _ in range(3)]
    assert victims == [Victim(15, path=path) for path in ("3000", "500", "900")]


def test_a_scan_sorts_by_time_and_removes_what_exceeds_the_limits() -> None:
    index = DiskIndex([SIZE], 60, quota=0.5)
    index.add([scanned(number, 9 - number, 7 if number < 5 else 0) for number in range(8)], False, NOW)
    index.sort()
    gone = []
    while (victim := index.excess()) is not None:
        index.release(victim.num_bytes)
        gone.append(victim.key)
    assert gone == [key_of(7), key_of(6), key_of(4), key_of(3)], "oldest first, then those of the owner above its share"


def test_an_object_larger_than_a_limit_is_refused_and_removes_nothing() -> None:
    for owner, limit, quota in ((0, SIZE - 1, 1.0), (3, 100, 0.05)):
        index = DiskIndex([SIZE, 2], limit, quota)
        small = index.reserve(owner, 2)
        assert isinstance(small, Reserved) and index.commit(key_of(1), small, 0)
        with pytest.raises(NoRoom):
            index.reserve(owner, SIZE)
        assert len(index) == 1
    reserved = DiskIndex([SIZE], 100, quota=0.05).reserve(0, SIZE)
    assert isinstance(reserved, Reserved), "blocks without an owner have no share"


def test_a_scan_knows_the_sizes_of_objects() -> None:
    index = DiskIndex([SIZE, 17], 100)
    sizes = (17, SIZE, 11, 17)
    files = [msgspec.structs.replace(scanned(number, number), num_bytes=size) for number, size in enumerate(sizes)]
    index.add(files, is_foreign=False, now=NOW)
    index.sort()
    assert len(index) == 3 and index.held_bytes == 55
    assert index.find([key_of(0)], 17) == index.find([key_of(1)], SIZE) == 1
    assert index.find([key_of(0)], SIZE) == index.find([key_of(2)], 11) == 0
    assert [victim.path or victim.key for victim in (index.reserve(0, 90), index.reserve(0, 90))] == [  # type: ignore[union-attr]
        "path of 2",
        key_of(3),
    ], "a file that is no object goes first, then the oldest use"


def test_what_is_written_while_all_is_cleared_is_not_found() -> None:
    index = DiskIndex([SIZE], 100)
    reserved = index.reserve(0, SIZE)
    assert not isinstance(reserved, Victim)
    index.clear()
    assert not index.commit(key_of(1), reserved, 0) and index.owner_of(key_of(1)) is None


def test_a_time_is_written_once_a_minute() -> None:
    index = DiskIndex([SIZE], 100)
    index.add([scanned(1, 1000)], is_foreign=False, now=1000)
    assert [index.wants_stamp(key_of(1), now) for now in (1059, 1060, 1061, 1119, 1120)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert not index.wants_stamp(key_of(2), 5000)


def test_times_in_the_future_are_the_oldest_and_are_written_again_at_the_next_use() -> None:
    index = DiskIndex([SIZE], SIZE)
    stamps = ((1, 500), (2, 2 * NOW), (3, 3 * NOW), (4, 400))
    index.add([scanned(number, stamp) for number, stamp in stamps], False, NOW)
    index.sort()
    assert [index.wants_stamp(key_of(2), NOW + second) for second in range(2)] == [True, False]
    assert index.wants_stamp(key_of(2), NOW - 500), "the clock was set back"
    assert [victim.key for victim in emptied(index)] == [key_of(number) for number in (2, 3, 4, 1)]
