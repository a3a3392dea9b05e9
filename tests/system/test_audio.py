"""Engines of models that hear audio answer chats with clips as transformers does, and transcribe uploads."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
import transformers

from tokenloom import LLM, RequestError, SamplingParams
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import SAMPLE_RATE, AudioOracle
from tokenloom.tests.support.media_oracle import NEAR_TIE
from tokenloom.tests.support.today import some_pairs
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_threads": 1, "device": "cpu", "max_model_len": 1024, "block_size": 8}
SCHEDULES = {"plain": {}, "small": {"max_num_batched_tokens": 16, "num_kv_blocks": 40, "max_num_seqs": 4}}
DEADLINE_S = 60.0


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
    cases = [("What is it?", [1.3]), ("And these?", [0.7, 1.9]), ("What is it now?", [1.3]), ("No clip", [])]
    chats = [
        (messages(question, *clips), clips)
        for question, lengths in cases
        for clips in [[samples(int(10 * length), length) for length in lengths]]
    ]
    given = [
        messages(chat[0]["content"][-1]["text"], *((clip, SAMPLE_RATE) for clip in clips)) for chat, clips in chats
    ]
    with LLM(folder, in_process=True, **OPTIONS, **SCHEDULES[schedule]) as llm:
        outputs = llm.chat(given, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    for (chat, clips), answer in zip(chats, answers, strict=True):
        assert len(answer) == MAX_TOKENS
        oracle.check(oracle.chat(chat), clips, answer)
    assert len({tuple(answer) for answer in answers}) == len(answers), "two prompts have the same answer"


@pytest.mark.nightly
def test_uploads_are_transcribed_through_all_processes(tmp_path: Path) -> None:
    """A clip of 7 s is cut into pieces of at most 2 s, the window of the model."""
    folder = audio_checkpoint(tmp_path, "qwen2_audio")
    command = ["--model", str(folder), "--http", "0", "--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
    (tmp_path / "run").mkdir()
    with Engine(tmp_path / "run", [*command, "--max-model-len", "1024"]) as engine:
        engine.wait_ready()
        with httpx2.Client(base_url=engine.url, timeout=DEADLINE_S) as http:
            files = {"file": ("speech.wav", wav(samples(1, 7.0)))}
            data = {"response_format": "verbose_json", "max_completion_tokens": "5", "temperature": "0"}
            found = http.post("/v1/audio/transcriptions", data=data, files=files)
            assert found.status_code == 200, found.text
            spoken = found.json()
            assert spoken["duration"] == pytest.approx(7.0, abs=0.01)
            assert len(spoken["segments"]) >= 4
            ends = [segment["end"] for segment in spoken["segments"]]
            assert ends == sorted(ends) and ends[-1] == pytest.approx(7.0, abs=0.01)
            bad = http.post("/v1/audio/transcriptions", data=data, files={"file": ("speech.wav", b"RIFF no sound")})
            assert bad.status_code == 400, bad.text
            assert json.loads(bad.text)["error"]["message"]
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)
        clip = ("speech.wav", wav(samples(2, 1.5)))
        model = client.models.list().data[0].id
        texts = {client.audio.transcriptions.create(model=model, file=clip, temperature=0).text for _ in range(2)}
        assert len(texts) == 1


def test_whisper_answers_to_clips_as_transformers_does(tmp_path: Path) -> None:
    folder = whisper_checkpoint(tmp_path / "whisper", has_rules=False)
    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    clips = [samples(seed, 0.3 + 0.1 * seed) for seed in range(5)]
    given = [{"prompt": prompt, "multi_modal_data": {"audio": (clip, SAMPLE_RATE)}} for clip in clips]
    options = OPTIONS | {"max_model_len": None, "max_num_batched_tokens": 64}
    with LLM(folder, in_process=True, **options) as llm:
        outputs = llm.generate(given, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="0 audio clips, this model answers to one"):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    num_samples = 320 * model.config.max_source_positions
    extractor = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins, chunk_length=1)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    begin = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for clip, output in zip(clips, outputs, strict=True):
        padded = np.pad(clip, (0, num_samples - len(clip)))  # the model's window, which is shorter than a second
        features = extractor(padded, sampling_rate=SAMPLE_RATE, padding=False, return_tensors="pt")["input_features"]
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(features, decoder_input_ids=torch.tensor([begin + answer])).logits[0]
        rows = logits[len(begin) - 1 : -1]
        misses = rows.max(dim=-1).values - rows[torch.arange(len(answer)), torch.tensor(answer)]
        assert len(answer) == MAX_TOKENS and misses.max() <= NEAR_TIE
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(clips)
