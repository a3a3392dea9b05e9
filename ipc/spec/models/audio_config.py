"""AudioConfig: the audio side of a model, as far as processes other than the workers know it.

An encoder takes audio as log-mel frames, 100 a second, in windows of equal length: 30 s, or 1 s for Qwen3-ASR. Whisper
and Voxtral pad the last window with silence, and attend to it; others attend to the audio alone. Convolutions make rows
of the frames of a window; each embedding covers some rows.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from .vision_config import Stage, row_products

AudioFamily: TypeAlias = Literal["qwen2_audio", "voxtral", "qwen3_asr", "whisper"]

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160  # from one frame to the next
MAX_PIECE_S = 30.0  # of a clip that is transcribed


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder of a model that hears audio. Sizes count elements."""

    kind: ClassVar[Literal["audio"]] = "audio"

    family: AudioFamily  # how audio is cut, expanded in prompts and encoded
    audio_token_id: int  # the placeholder, for which the encoder gives an embedding; Whisper's fills its clip's place
    hidden_size: int  # of the encoder
    num_layers: int  # of the encoder
    num_mel_bins: int
    window_frames: int  # frames of a window
    window_rows: int  # rows that the convolutions make of them
    num_halvings: int = 1  # convolutions that make one row or frame of two
    convolution_products: int = 0  # multiplications for a row, if they may be more than those of a layer
    rows_per_embed: int = 1
    windows_together: int = 1  # windows with rows that attend to each other
    max_windows: int = 0  # of one audio; 0: any number
    min_samples: int = 1  # a shorter audio is padded to so many

    is_bidirectional = False  # the placeholders of an audio attend to earlier tokens alone
    num_deepstack = 0

    @property
    def placeholder_id(self) -> int:
        return self.audio_token_id

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The parts of an encode, one after the other; those of one kind take equally long."""
        layers: list[Stage] = ["layer"] * self.num_layers
        return ("frames", "convolutions", *layers, "projector")

    @property
    def window_samples(self) -> int:
        return self.window_frames * HOP_SAMPLES

    @property
    def piece_s(self) -> float:
        """The seconds of the longest piece of a transcription: those of the windows, if there may be a limited
        number."""
        window_s = self.max_windows * self.window_samples / SAMPLE_RATE
        return min(MAX_PIECE_S, window_s) if self.max_windows else MAX_PIECE_S

    def num_windows(self, samples: int) -> int:
        """Return the windows of an audio, the last of which may be cut or padded."""
        return -(-max(samples, self.min_samples) // self.window_samples)

    def num_frames(self, samples: int) -> int:
        """Return the frames of an audio that the encoder attends to."""
        samples = max(samples, self.min_samples)
        if self.family in ("whisper", "voxtral"):
            return self.num_windows(samples) * self.window_frames
        return -(-samples // HOP_SAMPLES) if self.family == "qwen2_audio" else samples // HOP_SAMPLES

    def rows_of(self, samples: int) -> int:
        """Return the rows that the encoder computes for an audio."""
        whole, rest = divmod(self.num_frames(samples), self.window_frames)
        return whole * self.window_rows + halved(rest, self.num_halvings)

    def num_embeds(self, samples: int) -> int:
        """Return the embeddings of an audio of so many samples at SAMPLE_RATE; 0 if it is too short for one."""
        return self.rows_of(samples) // self.rows_per_embed

    def num_rows(self, num_embeds: int) -> int:
        """Return the rows that the embeddings of an audio cover."""
        return num_embeds * self.rows_per_embed

    def num_keys(self, num_rows: int) -> int:
        """Return how many rows of an audio one of its rows attends to, at most."""
        return min(num_rows, self.windows_together * self.window_rows)

    def num_products(self, num_rows: int) -> int:
        """Return the multiplications of the largest stage for so many rows."""
        return num_rows * max(row_products(self.hidden_size, self.num_keys(num_rows)), self.convolution_products)


def halved(count: int, times: int) -> int:
    """Return the outputs of `times` convolutions of stride 2, with padding at both ends, for `count` inputs."""
    for _ in range(times):
        count = (count + 1) // 2
    return count
