"""Drafts beside adapters, images and kills: no token is changed, repeated or lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenloom import RequestOutput, SamplingParams
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system import adapter_engine, media_engine, media_families, recorded_drafts
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, reconnecting, serve
from tokenloom.tests.system.sampling_engine import VOCAB_SIZE, make_prompts, open_llm, sampling_checkpoint
from tokenloom.tests.system.test_speculation import num_drafts

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


def check_tokens(expected: list[RequestOutput], found: list[RequestOutput], least_accepted: int) -> None:
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    drafted, accepted = num_drafts(found)
    assert drafted >= accepted > least_accepted


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
    [(1, "core"), *at_night((1, "worker 0"), (1, "frontend"), (2, "core"), (2, "core of replica 1"))],
    indirect=["engine"],
)
def test_a_process_killed_between_drafts_and_their_result_changes_no_answer(
    engine: Engine, role: str, case: Case
) -> None:
    case.check_kill(engine, role, 40, 100)


def test_drafts_of_rows_with_adapters_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder = tmp_path / "models"
    checkpoint = tiny_checkpoint(models_folder / "model", "qwen3", vocab_size=adapter_engine.VOCAB_SIZE)
    modules = [f"{path.name}={path}" for path in write_adapters(models_folder / "adapters", checkpoint, 3)]
    names = ["", *(each.split("=")[0] for each in modules)]
    requests = adapter_engine.make_requests(names, 12, seed=4, max_tokens=20)
    options = {**adapter_engine.OPTIONS, "in_process": True, "lora_modules": modules, "deterministic": True}
    with adapter_engine.LLM(checkpoint, **options, speculation="off") as llm:  # type: ignore[arg-type]
        expected = requests.run(llm)
    recorded_drafts.record(tmp_path / "record", "mixed", adapter_engine.VOCAB_SIZE, expected, requests.params)
    recorded_drafts.use(monkeypatch, tmp_path / "record")
    with adapter_engine.LLM(checkpoint, **options, max_num_seqs=5) as llm:  # type: ignore[arg-type]
        found = requests.run(llm)
    check_tokens(expected, found, 20)


@pytest.mark.parametrize("family", ["qwen2_5_vl", *at_night("llava")])
def test_drafts_behind_images_change_no_answer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind images have shifted positions, and their prompts hold placeholders."""
    models = media_families.make_models(tmp_path / "m", family)
    requests = media_engine.make_requests(models, 5, 6)
    with media_engine.open_llm(models, deterministic=True, speculation="off") as llm:
        expected = media_engine.run(llm, models, requests)
        vocab_size = max(token for each in expected for token in each.outputs[0].token_ids) + 1
    params = [SamplingParams(temperature=0, seed=None)] * len(expected)
    recorded_drafts.record(tmp_path / "record", "mixed", vocab_size, expected, params)
    recorded_drafts.use(monkeypatch, tmp_path / "record")
    with media_engine.open_llm(models, deterministic=True, max_num_seqs=4) as llm:
        found = media_engine.run(llm, models, requests)
    check_tokens(expected, found, 10)
