"""The notes of a core on the answers that it touches can be read after its end, however it ends."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.touched import MAX_ENTRIES, Touched, TouchedAnswers, read_touched
from tokenloom.tests.support.today import seeds


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
