"""No schedule changes an answer to a clip: all are those of transformers' Whisper, with timestamps and without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenloom.tests.support.audio_oracle import random_clip
from tokenloom.tests.support.today import some
from tokenloom.tests.support.whisper_checkpoints import IDS, TINY, whisper_checkpoint
from tokenloom.tests.support.whisper_oracle import WhisperOracle
from tokenloom.tests.system.whisper_core import ClipRequest, WhisperCore

NUM_ROWS, LONGEST = 50, 40
WINDOW = NUM_ROWS * 320  # samples
MAX_TOKENS = 20
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "chunks of 33": {"max_num_batched_tokens": 33, "max_num_seqs": 3},
    "preempted": {"num_kv_blocks": 26, "max_num_batched_tokens": 64},
    "small encoder cache, nothing kept": {"encoder_cache_tokens": NUM_ROWS, "enable_prefix_caching": False},
    "two steps in flight": {"steps_in_flight": 2, "max_num_batched_tokens": 40},
    "plain torch": {"enforce_reference": True, "max_num_batched_tokens": 40},
    "deterministic": {"deterministic": True, "max_num_batched_tokens": 40},
    "blocks of one token": {"block_size": 1, "num_kv_blocks": 1000},
}


class Models(NamedTuple):
    folder: Path
    oracle: WhisperOracle


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    sizes = {"max_source_positions": NUM_ROWS, "max_target_positions": LONGEST}
    folder = whisper_checkpoint(tmp_path_factory.mktemp("whisper"), **sizes)
    return Models(folder, WhisperOracle(folder))


def requests_of(seed: int, count: int = 12) -> list[ClipRequest]:
    """Requests about four clips of several lengths; some with timestamps, some with a text that comes before."""
    rng = random.Random(seed)
    clips = [random_clip(seed * 10 + i, length) for i, length in enumerate((WINDOW, 9000, 3333, 161))]
    requests = []
    for index in range(count):
        prompt = [IDS[name] for name in ("<|startoftranscript|>", rng.choice(["<|en|>", "<|de|>"]), "<|transcribe|>")]
        prompt += [IDS["<|notimestamps|>"]] * (index % 2)
        before = [IDS["<|startofprev|>"], *(rng.randrange(200, 2000) for _ in range(rng.randrange(1, 12)))]
        samples = clips[rng.randrange(4)]
        requests.append(ClipRequest(samples, [*before * (index % 3 == 0), *prompt], rng.choice([3, MAX_TOKENS])))
    return requests


def check(oracle: WhisperOracle, requests: Sequence[ClipRequest]) -> None:
    for request in requests:
        assert request.finished is not None and request.finished.reason == "length", request.finished
        assert len(request.outputs) == request.max_tokens
        oracle.check(request.samples, request.prompt, request.outputs)


def test_the_oracle_gives_the_answers_of_transformers_generate(models: Models) -> None:
    """And the checkpoint is fit for tests: other clips give other answers, and timestamps come."""
    answers = []
    for request in requests_of(1, 6):
        answer = models.oracle.generate(request.samples, request.prompt)
        models.oracle.check(request.samples, request.prompt, answer)
        answers.append(tuple(answer))
        has_times = any(token > IDS["<|notimestamps|>"] for token in answer)
        assert has_times or IDS["<|notimestamps|>"] in request.prompt
    prompt = requests_of(1, 1)[0].prompt
    others = {tuple(models.oracle.generate(random_clip(seed, 9000), prompt)) for seed in range(6)}
    assert len(others) >= 5
    with pytest.raises(AssertionError, match="misses by"):
        models.oracle.check(random_clip(7, 8000), prompt, next(iter(others)))


@pytest.mark.parametrize("schedule", some(list(SCHEDULES), num_today=4))
def test_no_schedule_changes_an_answer_to_a_clip(schedule: str, models: Models, tmp_path: Path) -> None:
    engine = WhisperCore(models.folder, tmp_path, **SCHEDULES[schedule])
    requests = requests_of(2)
    engine.answers(requests)
    check(models.oracle, requests)
    if schedule == "preempted":
        assert engine.core.scheduler.num_preemptions > 0
    if schedule == "plain":
        again = requests_of(2)
        engine.answers(again)
        assert [each.outputs for each in again] == [each.outputs for each in requests]
        assert engine.num_encodes == len({request.samples.tobytes() for request in requests})


def test_equal_clips_share_their_blocks_and_others_find_none(models: Models, tmp_path: Path) -> None:
    engine = WhisperCore(models.folder, tmp_path)
    first, same, other = requests_of(2, 1)[0], requests_of(2, 1)[0], requests_of(2, 1)[0]
    other.samples = random_clip(99, WINDOW)
    for request in (first, same, other):
        engine.answers([request])
    check(models.oracle, [first, same, other])
    clip = engine.spec.model.num_clip_tokens
    assert engine.cached[0] == engine.cached[2] == 0
    assert engine.cached[1] >= clip
    assert engine.num_encodes == 2


@pytest.mark.parametrize("loss", ["worker", "core"])
def test_a_loss_changes_no_answer_to_a_clip(loss: str, models: Models, tmp_path: Path) -> None:
    engine = WhisperCore(models.folder, tmp_path, max_num_batched_tokens=48)
    requests = requests_of(3, 8)
    for key, request in enumerate(requests):
        engine.add(key, request)
    for num_turns in (2, 9, 12):
        for _ in range(num_turns):
            engine.turn()
        (engine.lose_worker if loss == "worker" else engine.lose_core)()
    engine.run()
    check(models.oracle, requests)


def test_a_missing_file_ends_its_requests_alone(models: Models, tmp_path: Path) -> None:
    engine = WhisperCore(models.folder, tmp_path)
    requests = requests_of(4, 6)
    for key, request in enumerate(requests):
        engine.add(key, request)
    lost = requests[0].samples.tobytes()
    for path in files(tmp_path / "media"):
        if path.read_bytes().endswith(lost):
            path.unlink()
    engine.run()
    ended = [request for request in requests if request.samples.tobytes() == lost]
    for request in ended:
        assert request.finished is not None and request.finished.error is not None
        assert "an audio clip of the prompt could not be read" in request.finished.error.message
    check(models.oracle, [request for request in requests if request not in ended])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_model_of_the_shape_of_whisper_tiny_gives_the_answers_of_transformers(tmp_path: Path) -> None:
    folder = whisper_checkpoint(tmp_path / "model", **TINY)
    oracle = WhisperOracle(folder)
    engine = WhisperCore(folder, tmp_path / "run", block_size=16, num_kv_blocks=400)
    assert engine.spec.max_model_len == 1504 + 448
    clips = [random_clip(seed, length) for seed, length in enumerate((480_000, 100_000))]
    prompts = [request.prompt for request in requests_of(5, 4)]
    requests = [ClipRequest(clips[index % 2], prompt, 40) for index, prompt in enumerate(prompts)]
    engine.answers(requests)
    check(oracle, requests)
    assert engine.num_encodes == 2


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
