"""The cases of a day: as many as wanted, others the next day, all of them within a round."""

from __future__ import annotations

import pytest

from tokenloom.tests.support import today


def taken(params: list[object]) -> list[object]:
    """Return the values of the cases that the default run takes."""
    return [param.values for param in params if not param.marks]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("count", "num_today"), [(72, 6), (7, 3), (5, 5), (1, 1), (3, 8)])
def test_each_case_has_its_day_within_a_round(count: int, num_today: int) -> None:
    seen: set[object] = set()
    for day in range(-(-count // num_today)):
        cases = taken(today.some(range(count), num_today, 700_000 + day))
        assert len(cases) == min(count, num_today)
        seen |= set(cases)
    assert len(seen) == count


def test_a_latin_square_has_each_row_and_each_column_equally_often() -> None:
    pairs = taken(today.some_pairs("abcdef", range(6), 3))
    assert len(pairs) == 12
    assert all(
        sum(pair[i] == name for pair in pairs) == 2 for i, names in enumerate(("abcdef", range(6))) for name in names
    )


@pytest.mark.parametrize("takes_night", [False, True])
def test_seeds_of_today_come_before_those_of_the_night(takes_night: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(today.Run, "takes_night", takes_night)
    for params in (today.seeds(8, 32), today.some(range(40), 8)):
        assert len(params) == (40 if takes_night else 8) and len(taken(params)) == 8
    assert taken(today.seeds(8, 32))[0] == (today.DAY * 1000,)
    assert today.chosen("abcde", 2) == (list("abcde") if takes_night else [x for (x,) in taken(today.some("abcde", 2))])
    assert len(today.some([*"abcde"], 2)) == 5, "places of cases stay, since they may be their names"
