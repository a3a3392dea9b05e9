"""The demo audio model transcribes speech of voices that it was not trained with, by transformers and by the engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tokenloom import LLM
from tokenloom.scripts.train.demo_speech import SAMPLE_RATE, SYMBOLS, UNSEEN_VOICES, VOICES, Clip
from tokenloom.scripts.train.train_demo_audio import (
    UTTERANCES,
    WINDOW_S,
    draw_clips,
    measure,
    record,
    transcribe,
    word_error_rate,
)
from tokenloom.tests.system.test_audio import wav

DEMO = Path(__file__).resolve().parents[3] / "demo" / "audio"
NUM_SPEAKERS, NUM_CLIPS = 12, 60
MOST_ERRORS = 0.15  # of words
TEXT = "T O K E N 2 0 2 6"
needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


@pytest.fixture(scope="module")
def clips() -> list[Clip]:
    """Return clips of voices, symbols and noise that the training did not have."""
    rng = Random("fresh voices")
    return draw_clips(rng, record(rng, NUM_SPEAKERS, UNSEEN_VOICES), NUM_CLIPS, WINDOW_S)


def shipped() -> Any:
    data = (DEMO / "clip.wav").read_bytes()
    return np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768


def load() -> tuple[Any, Any]:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32)
    return model.eval(), transformers.PreTrainedTokenizerFast.from_pretrained(DEMO)


def test_the_clip_that_ships_is_transcribed_by_transformers() -> None:
    assert transcribe(*load(), [Clip(shipped(), [])]) == [TEXT]


def test_the_engine_transcribes_the_clip_that_ships_and_names_its_language_and_times() -> None:
    with LLM(DEMO, in_process=True, num_threads=1, device="cpu") as llm:
        plain, timed, long, silent = (
            *llm.transcribe(DEMO / "clip.wav", language="en"),
            *llm.transcribe(DEMO / "clip.wav", return_timestamps=True),
            *llm.transcribe((np.tile(shipped(), 3), SAMPLE_RATE)),
            *llm.transcribe((np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE)),
        )
    assert (plain.text, plain.language) == (TEXT, "en")
    assert (timed.text, timed.language) == (TEXT, "en")
    assert len(timed.segments) > 1 and " ".join(each.text for each in timed.segments) == TEXT
    assert all(0 <= each.start_s < each.end_s <= timed.duration_s + 0.02 for each in timed.segments)
    assert word_error_rate([f"{TEXT} {TEXT} {TEXT}"], [long.text]) <= MOST_ERRORS
    assert silent.text == ""


@needs_espeak
def test_fresh_clips_of_unseen_voices_have_few_wrong_words(clips: list[Clip]) -> None:
    assert measure(*load(), clips) <= MOST_ERRORS


@needs_espeak
def test_the_engine_transcribes_as_transformers_does(clips: list[Clip]) -> None:
    model, tokenizer = load()
    with LLM(DEMO, in_process=True, num_threads=1, device="cpu", dtype="float32") as llm:
        outputs = llm.transcribe([wav(each.samples) for each in clips[:20]], language="en")
    rounded = [Clip((each.samples * 32768).astype(np.int16).astype(np.float32) / 32768, []) for each in clips[:20]]
    assert [output.text for output in outputs] == transcribe(model, tokenizer, rounded)


def test_unseen_voices_are_none_of_the_trained_ones() -> None:
    assert not {*VOICES} & {*UNSEEN_VOICES} and UTTERANCES > 1
    families = {voice.rstrip("0123456789").lower() for voice in VOICES} - {"f", "m"}
    assert not families & {voice.rstrip("0123456789").lower() for voice in UNSEEN_VOICES}


def test_a_blank_and_a_symbol_are_one_token() -> None:
    _, tokenizer = load()
    ids = tokenizer(f" {' '.join(SYMBOLS)}", add_special_tokens=False)["input_ids"]
    assert len(ids) == len(SYMBOLS)
