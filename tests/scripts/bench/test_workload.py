"""No benchmark sends a prompt twice: the prefix cache would make the second answer too fast."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.scripts.bench.cases.compare import Result, compare
from tokenloom.scripts.bench.contestant import measure_in_turn
from tokenloom.scripts.bench.limits import LimitsPeer
from tokenloom.scripts.bench.report import Report
from tokenloom.scripts.bench.workload import Workload, kept_checkpoint

WORKLOAD = Workload(num_requests=3, num_in=20, num_out=5, vocab_size=1000)


class PromptRecorder:
    """A contestant that always takes a second and records each prompt."""

    name = "recorder"

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        self.prompts += [tuple(prompt) for prompt in prompts]
        return 1.0

    def close(self) -> None:
        pass


class FixedLimits:
    """A machine with constant rates."""

    class _Rates:
        read_bytes_per_s = flops_per_s = 1e9

    class _Limits:
        def seconds(self, workload: Workload, rates: object, budget: int) -> float:
            return 1.0

    limits = _Limits()

    def measure(self) -> _Rates:
        return self._Rates()


def test_equal_names_give_equal_prompts_and_different_names_different_ones() -> None:
    names = ["warm-up", -2, -1, 0, 1, 2, "1, one token"]
    assert WORKLOAD.prompts(1) == WORKLOAD.prompts(1)
    drawn = [tuple(prompt) for name in names for prompt in WORKLOAD.prompts(name)]
    assert len(set(drawn)) == len(drawn) == len(names) * WORKLOAD.num_requests


def test_rounds_repeat_no_prompt_of_the_warm_up_or_of_other_rounds() -> None:
    recorder = PromptRecorder()
    measure_in_turn([recorder], WORKLOAD, 5, Report("test", {}))
    assert len(set(recorder.prompts)) == len(recorder.prompts) == 6 * WORKLOAD.num_requests


def test_a_comparison_repeats_no_prompt_between_whole_answers_and_first_tokens() -> None:
    recorder = PromptRecorder()
    limits: LimitsPeer = FixedLimits()  # type: ignore[assignment]
    compare([Result(recorder)], WORKLOAD, limits, argparse.Namespace(rounds=5, cpu=False))
    assert len(set(recorder.prompts)) == len(recorder.prompts) == 11 * WORKLOAD.num_requests


def test_prompts_have_the_shape_of_the_workload() -> None:
    prompts = WORKLOAD.prompts(1)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    assert all(10 <= token_id < 1000 for prompt in prompts for token_id in prompt)


def test_a_checkpoint_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written: list[Path] = []

    def write(folder: Path) -> None:
        folder.mkdir()
        written.append(folder)

    for _ in range(2):
        found = kept_checkpoint("a", write)
        assert found == tmp_path / "tokenloom" / "checkpoints" / "a" and found.is_dir()
    assert len(written) == 1


def test_a_cache_without_room_is_named_with_the_remedy_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        raise subprocess.CalledProcessError(1, ["a writer"])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint a could not be written to \S+ \(exit code 1\): set XDG_CACHE"):
        kept_checkpoint("a", write)
    assert not list((tmp_path / "tokenloom" / "checkpoints").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"checkpoint a cannot be kept in the cache folder \(.*: set XDG_CACHE"):
        kept_checkpoint("a", write)
