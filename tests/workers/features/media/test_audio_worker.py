"""A worker answers prompts with audio with transformers' tokens, however steps and encodes are cut."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tokenloom.ipc.blobs.media_file import MediaFile
from tokenloom.ipc.spec.models.audio_config import AudioConfig
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import AudioOracle, Samples
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.encoders.audio.audio_items import random_item
from tokenloom.tests.workers.features.media.media_engine import NUM_OUTPUTS, Engine, Prompt, answers
from tokenloom.tests.workers.random_schedule import message

COUNTS = (17_000, 30_001)  # samples


def audio_of(engine: Engine) -> AudioConfig:
    assert engine.spec.model.audio is not None
    return engine.spec.model.audio


def make_prompt(engine: Engine, counts: tuple[int, ...], seed: int, first_clip: int = 0) -> Prompt:
    """A prompt with audio between text drawn by `seed`."""
    items = [random_item(audio_of(engine), first_clip + number, count) for number, count in enumerate(counts)]
    return Prompt(engine, items, random.Random(seed))


def their_tokens(oracle: AudioOracle, prompt: Prompt) -> list[int]:
    """Greedy tokens of transformers, which expands the placeholders of its own."""
    token_ids, end = list[int](), 0
    for start, length, *_ in np.array(prompt.spans).reshape(-1, 5).tolist():
        token_ids += [*prompt.token_ids[end:start], oracle.placeholder_id]
        end = start + length
    token_ids += prompt.token_ids[end:]
    clips = [samples_of(item) for item in prompt.items]
    assert oracle.expand(token_ids, clips).token_ids == prompt.token_ids
    return oracle.generate(token_ids, clips, NUM_OUTPUTS)


def samples_of(item: MediaFile) -> Samples:
    return np.frombuffer(item.data, np.float32)


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_tokens_with_audio_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = audio_checkpoint(tmp_path / "model", name)
    engine, oracle = Engine(folder, tmp_path / "run"), AudioOracle(folder)
    assert engine.phases == ["load weights", "load encoder"]
    prompt = make_prompt(engine, COUNTS, seed=5)
    expected = their_tokens(oracle, prompt)
    for seed in range(3):
        assert answers(engine, prompt, seed) == expected
    others = [make_prompt(engine, COUNTS, seed=5, first_clip=clip) for clip in (3, 5, 7, 9)]
    found = [answers(engine, other, 0) for other in others]
    assert found == [their_tokens(oracle, other) for other in others]
    assert any(tokens != expected for tokens in found)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = audio_checkpoint(tmp_path_factory.mktemp("model") / "qwen3_asr", "qwen3_asr")
    return Engine(folder, tmp_path_factory.mktemp("run"))


def test_a_missing_audio_is_reported_by_its_kind(engine: Engine) -> None:
    prompt = make_prompt(engine, COUNTS, seed=1)
    lost = msgspec.structs.replace(prompt.orders[0], entry=9, digest=bytes(32))
    result = engine.execute(msgspec.structs.replace(message(), encodes=[lost]))
    assert [each.entry for each in result.failed_entries] == [9]
    assert result.failed_entries[0].error.startswith("an audio clip is no longer in the engine's store")
    wrong = msgspec.structs.replace(prompt.orders[0], num_embeds=3, entry=9)
    (failed,) = engine.execute(msgspec.structs.replace(message(), encodes=[wrong])).failed_entries
    assert failed.error == "an audio clip has 14 embeddings and 3 placeholders: send it again"


def test_memory_is_reserved_for_the_rows_of_the_largest_audio(engine: Engine) -> None:
    media, config = engine.worker._media, engine.spec.model
    assert media is not None
    assert media.reserved_bytes >= 400 * config.hidden_size * 4
    larger = msgspec.structs.replace(engine.spec, max_item_embeds=130)
    added = type(media)(larger, media.encoder, engine.worker._group, engine.worker._device).reserved_bytes
    rows_bytes = 130 * audio_of(engine).hidden_size * 4
    assert added - media.reserved_bytes >= 4 * rows_bytes
    assert media.shifts is None
