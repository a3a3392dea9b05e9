"""Notes of frontends and cores can be read after their end; a request that ended two frontends is refused by all."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.notes.deadly import (
    LOSSES_TO_REFUSE,
    MAX_KEYS,
    NONE,
    DeadlyRequests,
    NotedCoroutine,
    ReadingNote,
    note_path,
)
from tokenloom.ipc.notes.touched import MAX_ENTRIES, Touched, TouchedAnswers, read_touched
from tokenloom.tests.support.today import seeds


@pytest.fixture
def table(tmp_path: Path) -> DeadlyRequests:
    return DeadlyRequests(tmp_path)


def new_note(folder: Path, identity: str = "frontend-0") -> ReadingNote:
    return ReadingNote(str(folder), identity)


def test_a_request_is_refused_by_all_frontends_once_it_has_ended_two(table: DeadlyRequests, tmp_path: Path) -> None:
    bystander = new_note(tmp_path, "frontend-1")
    for number in range(LOSSES_TO_REFUSE):
        note = new_note(tmp_path, f"frontend-0-{number}")
        key = note.key_of(b"POST /v1/completions", b"{}")
        assert not note.is_deadly(key) and not bystander.is_deadly(key)
        note.begin(note.key_of(b"another"))
        note.end()
        note.begin(key)
        table.on_loss(f"frontend-0-{number}", is_to_blame=True)
    successor = new_note(tmp_path, "frontend-0-9")
    for each in (successor, bystander):
        assert each.is_deadly(key) and not each.is_deadly(each.key_of(b"another")) and not each.is_deadly(NONE)


def test_what_was_read_is_not_blamed_for_a_kill_from_outside(table: DeadlyRequests, tmp_path: Path) -> None:
    for number in range(5):
        note = new_note(tmp_path, f"frontend-0-{number}")
        note.begin(key := note.key_of(b"x"))
        table.on_loss(f"frontend-0-{number}", is_to_blame=False)
    assert not note.is_deadly(key)


def test_the_requests_of_threads_are_noted_beside_that_of_the_loop(table: DeadlyRequests, tmp_path: Path) -> None:
    keys = [bytes([number]) * 16 for number in range(1, 4)]
    for number in range(LOSSES_TO_REFUSE):
        note = new_note(tmp_path, f"frontend-0-{number}")
        note.begin(keys[0])
        note.hold(1, keys[1])
        note.hold(2, keys[2])
        note.hold(2, NONE)
        table.on_loss(f"frontend-0-{number}", is_to_blame=True)
    assert [note.is_deadly(key) for key in keys] == [True, True, False]


def test_a_note_survives_sigkill(table: DeadlyRequests, tmp_path: Path) -> None:
    for number in range(LOSSES_TO_REFUSE):
        if (pid := os.fork()) == 0:
            note = new_note(tmp_path, f"frontend-0-{number}")
            note.begin(note.key_of(b"x"))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        table.on_loss(f"frontend-0-{number}", is_to_blame=True)
    note = new_note(tmp_path)
    assert note.is_deadly(note.key_of(b"x"))
    assert not note_path(str(tmp_path), "frontend-0-0").exists()


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_the_newest_keys_are_refused_as_a_model_of_sets_says(seed: int, table: DeadlyRequests, tmp_path: Path) -> None:
    rng, losses, refused = random.Random(seed), dict[bytes, int](), list[bytes]()
    reader = new_note(tmp_path, "reader")
    for number in range(400):
        note = new_note(tmp_path, f"f{number}")
        key = note.begin(bytes([rng.randrange(1, 60)]) * 16) and note.current
        table.on_loss(f"f{number}", is_to_blame=True)
        losses[key] = losses.get(key, 0) + 1
        refused += [key] if losses[key] == LOSSES_TO_REFUSE else []
        assert {each for each in losses if reader.is_deadly(each)} == set(refused)


def test_the_table_keeps_the_newest_keys(table: DeadlyRequests, tmp_path: Path) -> None:
    reader, keys = new_note(tmp_path, "reader"), [number.to_bytes(16, "big") for number in range(1, MAX_KEYS + 4)]
    for key in keys:
        for _ in range(LOSSES_TO_REFUSE):
            new_note(tmp_path).begin(key)
            table.on_loss("frontend-0", is_to_blame=True)
    assert [reader.is_deadly(key) for key in keys] == [False] * 3 + [True] * MAX_KEYS
    assert len(table._losses) <= MAX_KEYS


def test_a_caller_cannot_foresee_keys(tmp_path: Path) -> None:
    found = set[bytes]()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        DeadlyRequests(tmp_path / name)
        found.add(new_note(tmp_path / name).key_of(b"x"))
    assert len(found) == 2


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold"):
        os.symlink("/dev/full", tmp_path / "deadly")
        DeadlyRequests(tmp_path)


def test_a_bound_function_is_noted_under_the_request_of_its_making() -> None:
    note, seen = ReadingNote(), list[bytes]()
    before = note.begin(b"k" * 16)
    call = note.bound(lambda _: seen.append(note.current))
    note.end(before)
    call(None)
    assert seen == [b"k" * 16] and note.current == NONE
    plain = note.bound(call)
    assert plain is call  # nothing was being read


def test_each_slice_of_a_coroutine_is_noted_and_no_wait_between() -> None:
    note, key = ReadingNote(), b"k" * 16
    in_slices, between = list[bytes](), list[bytes]()

    async def work() -> int:
        for _ in range(3):
            in_slices.append(bytes(note.cells[:16]))
            await asyncio.sleep(0)
        return 7

    async def bystander() -> None:
        for _ in range(5):
            between.append(bytes(note.cells[:16]))
            await asyncio.sleep(0)

    async def main() -> int:
        other = asyncio.ensure_future(bystander())
        result = await NotedCoroutine(note, work(), key)
        await other
        return result

    assert asyncio.run(main()) == 7
    assert in_slices == [key] * 3 and between == [NONE] * 5


@pytest.mark.parametrize("ending", ["error", "cancel", "close"])
def test_the_note_ends_with_a_coroutine_however_it_ends(ending: str) -> None:
    note = ReadingNote()

    async def work() -> None:
        if ending == "error":
            raise KeyError
        try:
            await asyncio.sleep(60)
        finally:
            assert ending == "close" or note.current == b"k" * 16

    async def main() -> None:
        noted: Coroutine[Any, Any, None] = NotedCoroutine(note, work(), b"k" * 16)
        if ending == "close":
            noted.close()
            return
        task = asyncio.ensure_future(noted)
        await asyncio.sleep(0)
        if ending == "cancel":
            task.cancel()
        with pytest.raises(KeyError if ending == "error" else asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert note.current == NONE and note.cells[:16] == NONE


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_the_one_that_is_added_is_read_else_those_that_were_admitted_last(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "touched"
    answers, admitted, adding = TouchedAnswers(path), list[Touched](), list[Touched]()
    for _ in range(300):
        answer = Touched(rng.choice([b"frontend-0", b"frontend-12"]), rng.randrange(1 << 31))
        match rng.randrange(4):
            case 0:
                answers.begin_adding(*answer)
                adding = [answer]
            case 1:
                answers.end_adding()
                adding = []
            case 2:
                answers.admit(*answer)
                admitted.append(answer)
            case _ if rng.random() < 0.2:
                answers.forget_admitted()
                admitted = []
        assert read_touched(path) == (adding or admitted)


def test_a_killed_process_leaves_its_notes_and_the_next_one_starts_without(tmp_path: Path) -> None:
    path = tmp_path / "touched"
    assert read_touched(path) == []
    if (pid := os.fork()) == 0:
        answers = TouchedAnswers(path)
        for key in range(MAX_ENTRIES + 5):
            answers.admit(b"frontend-3", key)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_touched(path) == [Touched(b"frontend-3", key) for key in range(MAX_ENTRIES)]
    TouchedAnswers(path)
    assert read_touched(path) == []


def test_a_full_disk_is_an_error_of_the_operator_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"the run directory cannot hold the 32776 bytes of /dev/full: .*make room"):
        TouchedAnswers(Path("/dev/full"))
