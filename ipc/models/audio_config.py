"""AudioConfig: the audio side of a model, as far as processes other than the workers know it.

An encoder takes audio as log-mel frames, 100 a second, in windows of equal length: 30 s, or 1 s for Qwen3-ASR, whose
last window is cut to the audio. Convolutions make rows of the frames of a window; each embedding covers some rows.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .vision_config import Stage

AudioFamily: TypeAlias = Literal["qwen2_audio", "voxtral", "qwen3_asr", "whisper"]

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160  # from one frame to the next


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder of a model that hears audio. Sizes count elements."""

    family: AudioFamily  # how audio is cut, expanded in prompts and encoded
    audio_token_id: int  # the placeholder, for which the encoder gives an embedding; Whisper's fills its clip's place
    hidden_size: int  # of the encoder
    num_layers: int  # of the encoder
    num_mel_bins: int
    window_frames: int  # frames of a window
    window_rows: int  # rows that the convolutions make of them
    rows_per_embed: int = 1
    windows_together: int = 1  # windows whose rows attend to each other
    max_windows: int = 0  # of one audio; 0: any number

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

    def num_rows(self, num_embeds: int) -> int:
        """Return the rows of an audio in the encoder, without those that no embedding covers."""
        return num_embeds * self.rows_per_embed

    def num_keys(self, num_rows: int) -> int:
        """Return how many rows of an audio one of its rows attends to, at most."""
        return min(num_rows, self.windows_together * self.window_rows)
