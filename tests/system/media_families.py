"""The models of the tests of media: tiny random ones of every family that sees or hears, with media and an oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.processors.image_processor_config import load_image_processor
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import SAMPLE_RATE, AudioOracle, Samples, random_clip
from tokenloom.tests.support.mmproj_checkpoints import write_files
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.support.vision_oracle import VisionOracle, random_image
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint
from tokenloom.tests.support.whisper_oracle import WhisperOracle

BLOCK_SIZE = 8  # of all engines here
WHISPER = "whisper"
FAMILIES = (*VISION_MODELS, *AUDIO_MODELS, WHISPER)
HEARING = (*AUDIO_MODELS, WHISPER)
IMAGES = ((60, 80), (100, 40), (33, 33), (200, 150))  # width and height
CLIPS = (6000, 17_000, 31_000, 2500)  # samples
LONG_CLIPS = (6000, 44_000, 31_000, 70_000)  # of a model with windows of two seconds and of one length
WHISPER_ROWS, WHISPER_LONGEST = 100, 96  # of the encoder, each of 320 samples; tokens of the decoder


SMALL_PIXELS = {"min_pixels": 32 * 32, "max_pixels": 96 * 96}  # of Qwen's images; files have the published bounds


class Expanded(Protocol):
    """A prompt with a token for each embedding of its media."""

    @property
    def token_ids(self) -> list[int]: ...


class Oracle(Protocol):
    """Greedy answers of transformers."""

    def expand(self, prompt: str, media: Sequence[Any], /) -> Expanded:
        """Return the prompt as the engine reports it."""

    def span(self, prompt: str, media: Sequence[Any], /) -> tuple[int, int]:
        """Return the index of the first token of a prompt's media and the one behind their last."""

    def check(self, prompt: str, media: Sequence[Any], answer: Sequence[int], /) -> None:
        """Raise AssertionError if the answer is not that of transformers, up to near ties."""


@dataclass(frozen=True)
class Models:
    """A checkpoint, its media and the oracle. marker: the text of a medium in a prompt, empty if prompts begin with
    their only medium, of `num_clip_tokens`. options: of engines."""

    checkpoint: Path
    kind: str  # of media
    marker: str
    oracle: Oracle
    sizes: Sequence[Any]
    max_embeds: int  # of one medium
    options: dict[str, object] = field(default_factory=dict)
    num_clip_tokens: int = 0

    def pool(self, seed: int) -> list[Any]:
        """Return one medium of each size."""
        seeds = range(seed * 100, seed * 100 + len(self.sizes))
        if self.kind == "image":
            return [random_image(each, *size) for each, size in zip(seeds, self.sizes, strict=True)]
        return [random_clip(each, size) for each, size in zip(seeds, self.sizes, strict=True)]

    def given(self, medium: Any) -> Any:
        """Return a medium as clients give it."""
        return medium if self.kind == "image" else (medium, SAMPLE_RATE)


def make_models(folder: Path, name: str, **text_fields: Any) -> Models:
    """Write the checkpoint of one of FAMILIES."""
    if name in VISION_MODELS:
        checkpoint = vision_checkpoint(folder, name, **text_fields)
        vision = load_model_config(checkpoint).vision
        assert vision is not None
        most = load_image_processor(checkpoint, vision).max_embeds
        return Models(checkpoint, "image", VISION_MODELS[name].image, VisionOracle(checkpoint), IMAGES, most)
    if name in AUDIO_MODELS:
        checkpoint, sizes = audio_checkpoint(folder, name, **text_fields), LONG_CLIPS if name == "voxtral" else CLIPS
        oracle = AudioOracle(checkpoint)
        most = max(oracle.num_placeholders(random_clip(0, size)) for size in sizes)
        options: dict[str, object] = {"max_audio_s": max(sizes) / SAMPLE_RATE}
        return Models(checkpoint, "audio", AUDIO_MODELS[name].audio, oracle, sizes, most, options)
    checkpoint = whisper_checkpoint(
        folder, max_source_positions=WHISPER_ROWS, max_target_positions=WHISPER_LONGEST, **text_fields
    )
    whisper = ClipFirstOracle(checkpoint)
    options = {"max_model_len": None}  # that of the decoder
    sizes = (WHISPER_ROWS * 320, 9000, 3333, 161)  # samples
    return Models(checkpoint, "audio", "", whisper, sizes, WHISPER_ROWS, options, len(whisper.clip))


def make_gguf_models(folder: Path, name: str, **text_fields: Any) -> Models:
    """Write one of MMPROJ_MODELS as GGUF files of the language model and the encoder. The oracle has the checkpoint of
    which they were made."""
    files = write_files(folder, name, **text_fields)
    if name not in VISION_MODELS:
        sizes, oracle = LONG_CLIPS if name == "voxtral" else CLIPS, AudioOracle(files.checkpoint)
        most = max(oracle.num_placeholders(random_clip(0, size)) for size in sizes)
        options: dict[str, object] = {"max_audio_s": max(sizes) / SAMPLE_RATE}
        return Models(files.model, "audio", AUDIO_MODELS[name].audio, oracle, sizes, most, options)
    options, settings = {}, VISION_MODELS[name].preprocessor
    if name.startswith("qwen"):
        options = {"mm_processor_kwargs": SMALL_PIXELS}
        (files.checkpoint / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    vision = load_model_config(files.checkpoint).vision
    assert vision is not None
    most = load_image_processor(files.checkpoint, vision).max_embeds
    oracle_of_images = VisionOracle(files.checkpoint)
    return Models(files.model, "image", VISION_MODELS[name].image, oracle_of_images, IMAGES, most, options)


class ClipFirstPrompt(NamedTuple):
    """A prompt behind the tokens of its clip."""

    token_ids: list[int]


class ClipFirstOracle:
    """The oracle of Whisper: each prompt begins with its clip."""

    def __init__(self, checkpoint: Path) -> None:
        model = load_model_config(checkpoint)
        assert model.cross is not None and model.audio is not None
        self.clip = [model.audio.audio_token_id] * model.cross.in_blocks(BLOCK_SIZE).num_tokens
        self._oracle = WhisperOracle(checkpoint)

    def expand(self, prompt: str, clips: Sequence[Samples]) -> ClipFirstPrompt:
        return ClipFirstPrompt([*self.clip * len(clips), *self._oracle.ids(prompt)])

    def span(self, prompt: str, clips: Sequence[Samples]) -> tuple[int, int]:
        return 0, len(self.clip)

    def generate(self, prompt: str, clips: Sequence[Samples]) -> list[int]:
        (clip,) = clips
        return self._oracle.generate(clip, self._oracle.ids(prompt))

    def check(self, prompt: str, clips: Sequence[Samples], answer: Sequence[int]) -> None:
        (clip,) = clips
        self._oracle.check(clip, self._oracle.ids(prompt), answer)
