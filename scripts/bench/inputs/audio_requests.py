"""Requests with audio for benchmarks: checkpoints of medium size, clips, transcripts by the engine and transformers.

Weights are random. whisper-tiny has the shape of openai/whisper-tiny; audio-135m has an encoder of that shape, as
Qwen2-Audio's, and a language model of 135 M parameters. They are written once to the user's cache, which needs a
checkout with its tests.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenloom import AsyncClient, SamplingParams
from tokenloom.ipc.spec.models.audio_config import SAMPLE_RATE
from tokenloom.scripts.bench.inputs.image_requests import TEXT_SHAPE, Call
from tokenloom.scripts.bench.workload import kept_checkpoint

WHISPER_PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def find_audio_checkpoint(name: str) -> Path:
    """Return the folder of the checkpoint `name`; write it if it does not exist yet."""
    return kept_checkpoint(f"{name}-bfloat16", WRITERS[name])


def _write_whisper(folder: Path) -> Path:
    import torch

    from tokenloom.tests.support.whisper_checkpoints import TINY, whisper_checkpoint

    return whisper_checkpoint(folder, torch.bfloat16, has_rules=False, **TINY)


def _write_audio(folder: Path) -> Path:
    import torch

    from tokenloom.tests.support.audio_configs import QWEN2_AUDIO
    from tokenloom.tests.support.media_checkpoints import write_media_checkpoint
    from tokenloom.tests.support.whisper_checkpoints import TINY

    names = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins")
    tower = QWEN2_AUDIO.config["audio_config"] | {name: TINY[name] for name in names} | {"max_source_positions": 1500}
    text = QWEN2_AUDIO.config["text_config"] | TEXT_SHAPE | {"rope_scaling": None}
    extractor = {**QWEN2_AUDIO.preprocessor, "feature_size": TINY["num_mel_bins"], "chunk_length": 30}
    config = {**QWEN2_AUDIO.config, "audio_config": tower, "text_config": text}
    model = replace(QWEN2_AUDIO, config=config, preprocessor=extractor)
    return write_media_checkpoint(folder, model, model.audio, torch.bfloat16)


WRITERS: dict[str, Callable[[Path], Path]] = {"whisper-tiny": _write_whisper, "audio-135m": _write_audio}


def clip_samples(seed: object, seconds: float) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return noise whose loudness changes like that of speech, at SAMPLE_RATE."""
    rng, count = np.random.default_rng(random.Random(str(seed)).getrandbits(64)), int(seconds * SAMPLE_RATE)
    loudness = np.interp(np.arange(count), np.arange(0, count + 1600, 1600), rng.random(count // 1600 + 1))
    return (8000 * loudness * rng.standard_normal(count)).clip(-32768, 32767).astype(np.int16)


def clip_file(seed: object, seconds: float) -> bytes:
    """Return a WAV file of `clip_samples`."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        sound.writeframes(clip_samples(seed, seconds).tobytes())
    return file.getvalue()


@dataclass
class ClipCall(Call):
    """A chat about a clip; or, without a prompt, Whisper's transcript of it."""

    clip: bytes = b""

    @property
    def messages(self) -> list[dict[str, Any]]:
        parts = [{"type": "audio", "audio": self.clip}, {"type": "text", "text": self.prompt}]
        return [{"role": "user", "content": parts}]


async def transcribe_all(client: AsyncClient, clips: Sequence[bytes], num_out: int) -> float:
    """Transcribe clips at once with Whisper, in exactly `num_out` tokens each; return the seconds that it took."""
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)

    async def run(clip: bytes) -> None:
        prompt = {"prompt": WHISPER_PROMPT, "multi_modal_data": {"audio": clip}}
        async for output in client.generate(prompt, params):
            if output.finished and len(output.outputs[0].token_ids) != num_out:
                raise SystemExit(f"a transcript has {len(output.outputs[0].token_ids)} tokens of {num_out}")

    begun = time.perf_counter()
    await asyncio.gather(*(run(clip) for clip in clips))
    return time.perf_counter() - begun


class TransformersWhisper:
    """transformers' feature extractor and `generate` in this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
        self._model, self._extractor = model.eval(), transformers.WhisperFeatureExtractor.from_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self._prompt = tokenizer(WHISPER_PROMPT, add_special_tokens=False)["input_ids"]

    def transcribe_all(self, clips: Sequence[np.ndarray[Any, np.dtype[np.int16]]], num_out: int) -> float:
        """Transcribe clips in one batch, in exactly `num_out` tokens each; return the seconds that it took."""
        torch, begun = self._torch, time.perf_counter()
        samples = [clip.astype(np.float32) / 32768 for clip in clips]
        features = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            tokens = self._model.generate(
                input_features=features.to(torch.bfloat16),
                decoder_input_ids=torch.tensor([self._prompt] * len(clips)),
                do_sample=False,
                num_beams=1,
                min_new_tokens=num_out,
                max_new_tokens=num_out,
            )
        seconds = time.perf_counter() - begun
        if tokens.shape[1] not in (num_out, num_out + len(self._prompt)):
            raise SystemExit(f"transformers gave {tokens.shape[1]} tokens, {num_out} were asked for")
        return seconds
