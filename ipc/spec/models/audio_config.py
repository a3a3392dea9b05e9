"""AudioConfig: the audio encoder of a model, as far as processes other than the workers need to know it.

An encoder takes audio as log-mel frames, 100 a second, in windows of equal length: 30 s, or 1 s for Qwen3-ASR. Whisper
and Voxtral pad the last window with silence, and attend to it; others attend to the audio alone. Convolutions turn the
frames of a window into rows; each embedding covers `rows_per_embed` rows.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from .vision_config import Stage, row_products

AudioFamily: TypeAlias = Literal["qwen2_audio", "voxtral", "qwen3_asr", "whisper"]

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160  # from one frame to the next
MAX_PIECE_S = 30.0  # longest piece of a clip in a transcription


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The audio encoder of a model. Sizes count elements."""

    kind: ClassVar[Literal["audio"]] = "audio"

    family: AudioFamily  # how audio is cut, expanded in prompts and encoded
    audio_token_id: int  # placeholder of an embedding of the encoder; Whisper's fills the positions of its clip
    hidden_size: int  # of the encoder
    num_layers: int  # of the encoder
    num_mel_bins: int
    window_frames: int  # frames of a window
    window_rows: int  # rows that the convolutions make of a window
    num_halvings: int = 1  # convolutions with stride 2
    convolution_products: int = 0  # multiplications of the convolutions per row, if they may exceed a layer's
    rows_per_embed: int = 1
    windows_together: int = 1  # consecutive windows with rows that attend to each other
    max_windows: int = 0  # most windows of one clip; 0: any number
    min_samples: int = 1  # a shorter clip is padded to this many samples

    is_bidirectional = False  # a clip's placeholders attend only to earlier tokens
    num_deepstack = 0

    @property
    def placeholder_id(self) -> int:
        return self.audio_token_id

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of encoding a clip, in order; stages of one kind take equally long."""
        layers: list[Stage] = ["layer"] * self.num_layers
        return ("frames", "convolutions", *layers, "projector")

    @property
    def window_samples(self) -> int:
        return self.window_frames * HOP_SAMPLES

    @property
    def piece_s(self) -> float:
        """Seconds of the longest piece of a transcription: MAX_PIECE_S, or the length of `max_windows` windows if that
        is less."""
        window_s = self.max_windows * self.window_samples / SAMPLE_RATE
        return min(MAX_PIECE_S, window_s) if self.max_windows else MAX_PIECE_S

    def num_windows(self, samples: int) -> int:
        """Return the number of windows of a clip with `samples` samples; the last may be shorter or padded."""
        return -(-max(samples, self.min_samples) // self.window_samples)

    def num_frames(self, samples: int) -> int:
        """Return the number of a clip's frames that the encoder attends to."""
        samples = max(samples, self.min_samples)
        if self.family in ("whisper", "voxtral"):
            return self.num_windows(samples) * self.window_frames
        return -(-samples // HOP_SAMPLES) if self.family == "qwen2_audio" else samples // HOP_SAMPLES

    def rows_of(self, samples: int) -> int:
        """Return the number of rows that the encoder computes for a clip with `samples` samples."""
        whole, rest = divmod(self.num_frames(samples), self.window_frames)
        return whole * self.window_rows + halved(rest, self.num_halvings)

    def num_embeds(self, samples: int) -> int:
        """Return the number of embeddings of a clip with `samples` samples at SAMPLE_RATE; 0 if it is too short."""
        return self.rows_of(samples) // self.rows_per_embed

    def num_rows(self, num_embeds: int) -> int:
        """Return the number of rows that a clip's embeddings cover."""
        return num_embeds * self.rows_per_embed

    def num_keys(self, num_rows: int) -> int:
        """Return the largest number of rows to which one row of a clip attends."""
        return min(num_rows, self.windows_together * self.window_rows)

    def num_products(self, num_rows: int) -> int:
        """Return the number of multiplications of the largest stage for `num_rows` rows."""
        return num_rows * max(row_products(self.hidden_size, self.num_keys(num_rows)), self.convolution_products)


def halved(count: int, times: int) -> int:
    """Return the number of outputs of `times` convolutions of stride 2, padded at both ends, for `count` inputs."""
    for _ in range(times):
        count = (count + 1) // 2
    return count
