"""The plan of scripts/gpu_check: done stays done, the rest goes on, the urgent comes first, within the time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.scripts.gpu.plan import Count, Need, Place, Plan, Results, Row, Stage, Step
from tokenloom.scripts.gpu.stages import STAGES

HERE = Place("c1", "a device")
START_S = 5.0  # of each command of the simulated machine


@dataclass
class World:
    """A simulated machine: the outcome and the seconds of each case. `ran` lists all that came to an end."""

    outcomes: dict[str, dict[str, str]]  # by stage and case: passes, fails, breaks its command
    seconds: dict[str, float]  # of a case
    ran: list[tuple[Need, str, str]] = field(default_factory=list)

    def call(self, results: Results, stages: list[Stage], seconds: float) -> Plan:
        """One call; fails if it takes longer than `seconds`."""
        spent_s, plan = [0.0], Plan(stages, results, 1)  # of each step
        for step in plan.steps(lambda: seconds - sum(spent_s)):
            assert step.stage.least_s <= step.limit_s <= min(step.stage.most_s, seconds - sum(spent_s))
            spent_s.append(self._run(step, results))
            assert spent_s[-1] <= step.limit_s
        return plan

    def _run(self, step: Step, results: Results) -> float:
        stage = step.stage.name
        results.begin(stage, "today")
        cases, rows, spent_s, ended = list(self.outcomes[stage]), list[Row](), START_S, "done"
        for case in [case for case in cases if case not in step.skip]:
            if spent_s + self.seconds[case] > step.limit_s:
                spent_s, ended = step.limit_s, "limit"
                break
            spent_s += self.seconds[case]
            self.ran.append((step.need, stage, case))
            result = self.outcomes[stage][case]
            rows.append({"case": case, **({} if result == "passes" else {"error": result})})
            results.record(stage, cases, rows)  # as during the run
            if result == "breaks its command":
                ended = "broken"
                break
        results.record(stage, cases, rows)
        results.end(stage, {"ended": ended})
        return spent_s


def stage(name: str, least_s: int = 10, most_s: int = 100, num_devices: int = 1) -> Stage:
    return Stage(name, f"title of {name}", most_s, least_s, most_s, num_devices)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[Stage]]:
    outcome = st.sampled_from(["passes", "passes", "passes", "fails", "breaks its command"])
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    names = {f"s{i}": [f"s{i} c{j}" for j in range(size)] for i, size in enumerate(sizes)}
    outcomes = {name: {case: draw(outcome) for case in cases} for name, cases in names.items()}
    seconds = {case: draw(st.floats(0.1, 40)) for cases in names.values() for case in cases}
    return World(outcomes, seconds), [stage(name, most_s=draw(st.integers(50, 120))) for name in names]


@given(worlds(), st.lists(st.floats(30, 400), min_size=1, max_size=4))
def test_calls_go_on_where_the_last_one_stopped(drawn: tuple[World, list[Stage]], calls: list[float]) -> None:
    world, stages = drawn
    results = Results(HERE)
    for seconds in [*calls, *[600.0] * 30]:
        before, num_ran = dict.fromkeys(done_cases(results, stages)), len(world.ran)
        world.call(results, stages, seconds)
        ran = world.ran[num_ran:]
        assert not {case for _, _, case in ran} & set(before), "a case that is done ran again"
        assert len({case for _, _, case in ran}) == len(ran), "a case ran twice in a call"
        needs = [need for need, _, _ in ran if need is not Need.NEW]
        assert needs == sorted(needs)
        results = Results(HERE, results.document)  # as read from the file
    for each in stages:
        wanted = world.outcomes[each.name]
        num_passed = sum(result == "passes" for result in wanted.values())
        assert results.count(each.name) == Count(num_passed, len(wanted) - num_passed, 0, 0)
        assert results.is_done(each.name) == (num_passed == len(wanted))


def done_cases(results: Results, stages: list[Stage]) -> list[str]:
    return [
        case for each in stages for case in results.cases(each.name) or [] if results.need(each.name, case) is Need.NONE
    ]


@given(worlds(), st.randoms(use_true_random=False))
def test_at_another_commit_all_runs_again_and_what_failed_there_runs_first(
    drawn: tuple[World, list[Stage]], draw: random.Random
) -> None:
    world, stages = drawn
    results = Results(HERE)
    for _ in range(12):
        world.call(results, stages, 1e6)
    old = {(each.name, case): row for each in stages for case, row in results.results(each.name).items()}
    world.ran.clear()
    mended = World({name: dict.fromkeys(cases, "passes") for name, cases in world.outcomes.items()}, world.seconds)
    later = Results(HERE._replace(commit="c2"), results.document)
    for each in stages:
        count = later.count(each.name)
        assert count == Count(0, 0, 0, len(world.outcomes[each.name]))
    for _ in range(12):
        mended.call(later, stages, 1e6)
    failed = {case for (_, case), row in old.items() if "error" in row}
    order = [case for _, _, case in mended.ran]
    assert set(order[: len(failed)]) == failed
    assert sorted(order) == sorted(case for _, case in old), "each runs once"
    assert all(later.is_done(each.name) for each in stages)
    kept = [(row["stage"], row["case"]) for row in later.document["history"] if row["commit"] == "c1"]
    assert set(kept) >= set(old)


def world_of(words: str, case_s: float = 1.0) -> World:
    """Return a world of cases. The first letter of each is its stage; one with "-" fails, one with "!" breaks its
    command."""
    world = World({}, {})
    for word in words.split():
        case = word.rstrip("-!")
        result = {"-": "fails", "!": "breaks its command"}.get(word[-1], "passes")
        world.outcomes.setdefault(case[0], {})[case] = result
        world.seconds[case] = case_s
    return world


def results_of(words: str, *stages: Stage) -> Results:
    """Return the results of one call without a limit."""
    results = Results(HERE)
    world_of(words).call(results, list(stages or [stage("a")]), 1e6)
    return results


@pytest.mark.parametrize(
    ("words", "case_s", "seconds", "ran", "counts"),
    [
        pytest.param("a1 b1 c1", 1, 60, "a1 c1", {"b": (0, 0, 0, None)}, id="a stage that does not fit is left"),
        pytest.param("a1 a2 d1", 50, 1000, "a1 d1 a2", {"a": (2, 0, 0, 0)}, id="one cut off goes on after the others"),
        pytest.param("a1! a2 a3! a4", 1, 1000, "a1 a2 a3 a4", {"a": (2, 2, 0, 0)}, id="one that breaks off goes on"),
        pytest.param("a1 t1-", 1, 1000, "a1", {"t": (0, 0, 1, 0)}, id="one that takes more devices is not measured"),
    ],
)
def test_a_call_runs_all_that_it_can(
    words: str, case_s: float, seconds: float, ran: str, counts: dict[str, tuple[int, int, int, int | None]]
) -> None:
    world, results = world_of(words, case_s), Results(HERE)
    stages = [stage("t", num_devices=2), stage("a"), stage("b", least_s=80), stage("c"), stage("d")]
    plan = world.call(results, [each for each in stages if each.name in world.outcomes], seconds)
    assert [case for _, _, case in world.ran] == ran.split()
    ((name, count),) = counts.items()
    assert results.count(name) == count and results.is_done(name) == (count[1] == 0 and count[3] == 0)
    assert plan.without_time == [name for name, count in counts.items() if count[3] is None]
    if name == "t":
        assert results.results(name)["title of t"]["not_measured"] == "takes 2 devices, 1 is visible"


def test_a_command_that_never_reports_is_started_once_a_call() -> None:
    results, starts = Results(HERE), 0
    for step in Plan([stage("a")], results, 1).steps(lambda: 1e6):
        starts += 1
        assert starts < 5
        results.begin(step.stage.name, "today")
        results.end(step.stage.name, {"ended": "limit"})
    assert starts == 1


@pytest.mark.parametrize("place", [Place("c1", "another"), Place("c1", "a device", True), None])
def test_results_of_another_device_of_a_rehearsal_or_of_a_forgotten_stage_are_history(place: Place | None) -> None:
    results = Results(place or HERE, results_of("a1 a2-").document)
    if place is None:
        results.forget("a")
    assert results.count("a")[:3] == (0, 0, 0) and results.results("a") == {}
    assert [row["case"] for row in results.document["history"]] == ["a1", "a2"]
    assert {results.need("a", case) for case in ("a1", "a2")} == {Need.NEW}


def test_cases_that_exist_no_more_are_dropped() -> None:
    later = Results(HERE._replace(commit="c2"), results_of("a1 a3-").document)
    world_of("a1 a2").call(later, [stage("a")], 1e6)
    assert later.cases("a") == ["a1", "a2"] and later.is_done("a")


def test_the_choice_names_all_kinds() -> None:
    results = results_of("a1 a2-")
    assert Plan([stage("a"), stage("b")], results, 1).choice() == (
        "commit c1: 1 results count. To run: stages that never ran: b; then 1 that failed at this commit"
    )
    later = Results(HERE._replace(commit="c2"), results.document)
    assert Plan([stage("a")], later, 1).choice() == (
        "commit c2: 0 results count. To run: 1 cases that never ran, were cut off or failed at another commit; "
        "then 1 that passed at another commit only"
    )


def test_the_stages_that_matter_most_fit_into_the_first_call() -> None:
    expected = {each.name: each.expected_s for each in STAGES}
    first = ("works", "parity", "graphs", "processes", "goals", "engines")
    assert tuple(expected)[: len(first)] == first
    assert sum(expected[name] for name in first) <= 555  # of 570
    assert sum(expected[name] for name in expected if name not in (*first, "nccl", "14b")) <= 555
    assert all(0 < each.least_s < each.expected_s <= each.most_s for each in STAGES)
