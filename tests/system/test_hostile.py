"""No hostile input of a caller cuts, delays or changes answers of others: scripts/chaos/hostile.py, short and long."""

from __future__ import annotations

from collections import Counter

import pytest

from tokenloom.scripts.chaos import hostile
from tokenloom.tests.support.today import DAY

EVERY = 15  # attacks, of which the next day takes another one
LAX_S = 20.0  # a frontend that hangs this long is replaced, which the script reports by itself


def test_hostile_inputs_end_no_process_and_cut_no_stream() -> None:
    which = ["--every", str(EVERY), "--first", str(DAY % EVERY)]
    assert hostile.main([*which, "--settle-s", "0", "--pause-limit-s", str(LAX_S)]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_hostile_inputs_end_no_process_keep_no_memory_and_cut_no_stream() -> None:
    assert hostile.main([]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_crowd_of_hostile_callers_delays_no_token() -> None:
    assert hostile.main(["--crowd-s", "60"]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_mixture_of_hostile_inputs_changes_no_answer_of_others() -> None:
    assert hostile.main(["--mixture-s", "120"]) == 0


def test_each_exceeded_limit_is_reported() -> None:
    attack = hostile.Attack("attack", Counter)
    row: dict[str, object] = {
        "longest pause in s": 2.0,
        "memory kept in MB": hostile.KEPT_LIMIT_MB,
        "by": "frontend",
        "CPU after it in s": None,
        "lost": "",
    }
    assert hostile.faults_of(row, Counter({"400": 2, "200": 1}), attack, [], 2.0) == []
    for spoiled, answers, cuts in (
        ({"longest pause in s": 2.1}, ["400"], []),
        ({"memory kept in MB": hostile.KEPT_LIMIT_MB + 1}, ["400"], []),
        ({"CPU after it in s": 0.9}, ["400"], []),
        ({"lost": "frontend"}, ["400"], []),
        ({}, ["500"], []),
        ({}, ["RemoteDisconnected"], []),
        ({}, ["400"], ["a stream ended"]),
    ):
        assert len(hostile.faults_of(row | spoiled, Counter(answers), attack, cuts, 2.0)) == 1
    compiled = row | {"memory kept in MB": hostile.KEPT_GRAMMAR_MB, "by": "grammar"}
    assert hostile.faults_of(compiled, Counter(["200"]), attack, [], 2.0) == []
    raw = attack._replace(is_raw=True)
    assert hostile.faults_of(row, Counter(["closed"]), raw, [], 2.0) == []
