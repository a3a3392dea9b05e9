"""Drafts beside kills: no token is changed, repeated or lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenloom import RequestOutput, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.system import recorded_drafts
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, reconnecting, serve
from tokenloom.tests.system.sampling_engine import VOCAB_SIZE, make_prompts, open_llm, sampling_checkpoint
from tokenloom.tests.system.test_speculation import check_tokens

pytestmark = pytest.mark.nightly

FLAGS = "--deterministic --max-model-len 400 --block-size 8 --max-num-seqs 8"


@dataclass
class Case:
    """Prompts with their parameters, and their answers without drafts."""

    folder: Path
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[RequestOutput]

    @classmethod
    def of(cls, folder: Path, prompts: list[list[int]], params: list[SamplingParams]) -> Case:
        with open_llm(folder, deterministic=True, speculation="off") as llm:
            return cls(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False))

    def arguments(self, num_replicas: int, *more: str) -> list[str]:
        return ["--model", str(self.folder), *FLAGS.split(), "--data-parallel-size", str(num_replicas), *more]

    def check_kill(self, engine: Engine, role: str, num_steps: int, least_accepted: int) -> None:
        """Kill a process after some steps; check the answers, and that enough drafts were accepted."""
        with reconnecting(engine) as client:
            futures = [client.submit(*each) for each in zip(self.prompts, self.params, strict=True)]
            wait_running(client, num_steps)
            engine.child(role).kill()
            assert not all(future.done() for future in futures), "the requests ended before the process"
            outputs = [future.result(timeout=RECOVERY_S) for future in futures]
        check_tokens(self.expected, outputs, least_accepted)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=200, ignore_eos=True) for i in range(24)]
    return Case.of(sampling_checkpoint(tmp_path_factory.mktemp("m") / "m"), make_prompts(24, 8), params)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of so many replicas with recorded drafts, most of which are right."""
    folder = tmp_path_factory.mktemp("run")
    recorded_drafts.record(folder / "record", "mixed", VOCAB_SIZE, case.expected, case.params)
    with pytest.MonkeyPatch.context() as context:
        recorded_drafts.use(context, folder / "record")
        engine = LaunchedEngine(folder, *case.arguments(request.param))
    yield from serve(engine)


@pytest.mark.parametrize(
    ("engine", "role"),
    [(1, "core"), (1, "worker 0"), (1, "frontend"), (2, "core"), (2, "core of replica 1")],
    indirect=["engine"],
)
def test_a_process_killed_between_drafts_and_their_result_changes_no_answer(
    engine: Engine, role: str, case: Case
) -> None:
    case.check_kill(engine, role, 40, 100)


@pytest.mark.parametrize("role", ["core", "core of replica 1"])
def test_a_core_of_several_replicas_killed_while_it_verifies_lookups_changes_no_answer(
    role: str, tmp_path: Path
) -> None:
    prompts = [prompt * 2 for prompt in make_prompts(24, 8)]  # repeated tokens are found and guessed
    params = [SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)] * len(prompts)
    case = Case.of(sampling_checkpoint(tmp_path / "m"), prompts, params)
    for engine in serve(LaunchedEngine(tmp_path, *case.arguments(2, "--speculation", "lookup"))):
        case.check_kill(engine, role, 60, 20)
