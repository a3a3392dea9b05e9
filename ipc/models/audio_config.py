"""AudioConfig: the audio side of a model, as far as processes other than the workers know it.

An encoder takes audio as log-mel frames, 100 a second, in windows of equal length: 30 s, or 1 s for Qwen3-ASR, which
cuts the last window to the audio. Convolutions make rows of the frames of a window; each embedding covers some rows.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from .vision_config import Grid, Stage

AudioFamily: TypeAlias = Literal["qwen2_audio", "voxtral", "qwen3_asr"]

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160  # from one frame to the next
QWEN3_ASR_SAMPLES = 8000  # a shorter audio is padded to these


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder of a model that hears audio. Sizes count elements."""

    kind: ClassVar[Literal["audio"]] = "audio"

    family: AudioFamily  # how audio is cut, expanded in prompts and encoded
    audio_token_id: int  # the placeholder of one embedding
    hidden_size: int  # of the encoder
    num_layers: int  # of the encoder
    num_mel_bins: int
    window_frames: int  # frames of a window
    window_rows: int  # rows that the convolutions make of them
    rows_per_embed: int = 1
    windows_together: int = 1  # windows with rows that attend to each other
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

    @property
    def min_samples(self) -> int:
        """The shortest audio that has an embedding. Qwen2-Audio's convolution and pooling need three frames."""
        return 2 * HOP_SAMPLES + 1 if self.family == "qwen2_audio" else 1

    @property
    def max_samples(self) -> int:
        """The longest audio; 0: any."""
        return self.max_windows * self.window_samples

    def num_padded(self, samples: int) -> int:
        """Return the samples of an audio as the encoder sees it, without the padding of its last window."""
        return max(samples, QWEN3_ASR_SAMPLES) if self.family == "qwen3_asr" else samples

    def num_windows(self, samples: int) -> int:
        """Return the windows of an audio of so many samples."""
        return max(1, -(-self.num_padded(samples) // self.window_samples))

    def num_embeds(self, samples: int) -> int:
        """Return the embeddings of an audio of so many samples, which are as many as its placeholders."""
        match self.family:
            case "qwen2_audio":
                frames = -(-samples // HOP_SAMPLES)
                return ((frames - 1) // 2 + 1 - 2) // 2 + 1
            case "voxtral":
                return self.num_windows(samples) * self.window_rows // self.rows_per_embed
            case "qwen3_asr":
                whole, left = divmod(self.num_padded(samples) // HOP_SAMPLES, self.window_frames)
                return whole * self.window_rows + num_chunk_rows(left)

    def num_rows(self, grid: Grid, num_embeds: int) -> int:
        """Return the rows of an audio in the encoder; its grid is (windows, 1, samples)."""
        return grid[0] * self.window_rows

    def num_keys(self, num_rows: int) -> int:
        """Return how many rows of an audio one of its rows attends to, at most."""
        return min(num_rows, self.windows_together * self.window_rows)


def num_chunk_rows(num_frames: int) -> int:
    """Return the rows that Qwen3-ASR's three convolutions of stride 2 make of a window's frames."""
    for _ in range(3):
        num_frames = (num_frames + 1) // 2
    return num_frames
