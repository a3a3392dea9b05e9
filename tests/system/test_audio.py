"""Engines of models that hear audio answer chats with clips as transformers does."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenloom import LLM, SamplingParams
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import SAMPLE_RATE, AudioOracle
from tokenloom.tests.support.today import some_pairs

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_threads": 1, "device": "cpu", "max_model_len": 1024, "block_size": 8}
SCHEDULES = {"plain": {}, "small": {"max_num_batched_tokens": 16, "num_kv_blocks": 40, "max_num_seqs": 4}}


def samples(seed: int, seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return noise with a tone, as a client decodes 16-bit samples."""
    rng, count = np.random.default_rng(seed), int(seconds * SAMPLE_RATE)
    tone = 0.3 * np.sin(2 * np.pi * rng.uniform(100, 2000) * np.arange(count) / SAMPLE_RATE)
    return (np.round((tone + 0.05 * rng.standard_normal(count)) * 32767) / 32768).astype(np.float32)


def wav(clip: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((clip * 32768).astype("<i2").tobytes())
    return buffer.getvalue()


def messages(question: str, *clips: object) -> list[dict[str, Any]]:
    parts = [{"type": "audio", "audio": clip} for clip in clips]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


@pytest.mark.parametrize(("name", "schedule"), some_pairs(list(AUDIO_MODELS), list(SCHEDULES), every=2))
def test_answers_to_clips_are_those_of_transformers(name: str, schedule: str, tmp_path: Path) -> None:
    folder = audio_checkpoint(tmp_path, name)
    oracle = AudioOracle(folder)
    one, two, three = (samples(seed, seconds) for seed, seconds in enumerate((1.3, 0.7, 1.9)))
    cases = [("What is it?", [one]), ("And these?", [two, three]), ("What is it now?", [one]), ("No clip", [])]
    given = [messages(question, *((clip, SAMPLE_RATE) for clip in clips)) for question, clips in cases]
    with LLM(folder, in_process=True, **OPTIONS, **SCHEDULES[schedule]) as llm:
        outputs = llm.chat(given, GREEDY, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    for (question, clips), answer in zip(cases, answers, strict=True):
        assert len(answer) == MAX_TOKENS
        oracle.check(oracle.chat(messages(question, *clips)), clips, answer)
    assert len({tuple(answer) for answer in answers}) == len(answers), "two prompts have the same answer"
