"""AudioTower: an encoder of audio. Convolutions turn log-mel frames into rows, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ....ipc.blobs.media_file import MediaFile
from ....ipc.spec.models.audio_config import HOP_SAMPLES
from ....ipc.spec.models.vision_config import Grid
from ..attention import joined
from ..blocks import Block, EncoderState, Tower
from .audio_files import AudioFiles
from .convolutions import FrameConvolutions
from .log_mel import SILENCE, normalized


@dataclass(eq=False)
class AudioState(EncoderState):
    """Encoder state of an audio clip. Its signal is the samples followed by padding."""

    samples: Tensor  # float32 [n]
    length: int  # samples of the signal
    num_frames: int  # frames of the signal
    num_heard: int  # frames that contain samples of the clip; later ones are silence
    logarithms: Tensor  # float32 [mel bins, frames of all windows], not normalized
    peak: Tensor = field(default_factory=lambda: torch.tensor(SILENCE))  # maximum of all frames


class AudioTower(Tower[AudioState]):
    """An encoder of audio. `owner`: the module with the convolutions `names`."""

    def __init__(self, files: AudioFiles, blocks: list[Block], owner: nn.Module, names: Sequence[str]) -> None:
        super().__init__(blocks)
        self._files, self._audio = files, files.audio
        self._convolutions = FrameConvolutions(owner, names, files.audio.window_frames)

    def length_of(self, count: int) -> int:
        """Return the length of the signal for `count` samples, padding included."""
        raise NotImplementedError

    def embed(self, outputs: Tensor, first: int) -> Tensor:
        """Return m rows of each of n windows, from row `first` of the window on: [n, m, hidden]. outputs: those of the
        convolutions, [n, channels, …, m]."""
        raise NotImplementedError

    def open(self, media: MediaFile, grid: Grid) -> AudioState:
        samples, audio = self._files.read(media, grid), self._audio
        length, num_rows = self.length_of(len(samples)), audio.rows_of(len(samples))
        num_frames, together = length // HOP_SAMPLES, audio.windows_together * audio.window_rows
        num_columns = -(-num_frames // audio.window_frames) * audio.window_frames
        return AudioState(
            samples,
            length,
            num_frames,
            min(-(-(len(samples) + self._files.mel.reach) // HOP_SAMPLES), num_frames),
            torch.full((audio.num_mel_bins, num_columns), SILENCE, device=samples.device),
            torch.full((), SILENCE, device=samples.device),
            bounds=[*range(0, num_rows, together), num_rows],
        )

    def prepare(self, state: AudioState, first: int, last: int) -> None:
        for piece in range(first, last):  # one by one: together they would be rounded differently
            begin, end = state.cut(state.num_heard, piece), state.cut(state.num_heard, piece + 1)
            if begin < end:
                found = self._files.mel.logarithms(state.samples, state.length, begin, end)
                state.logarithms[:, begin:end] = found
                state.peak = torch.maximum(state.peak, found.max())

    def rows(self, state: AudioState, start: int, stop: int) -> Tensor:
        parts, size = list[Tensor](), self._audio.window_rows
        while start < stop:
            window, first = divmod(start, size)
            num_windows, last = 1, min(first + stop - start, size)
            if first == 0:
                num_windows = max(min((stop - start) // size, self._audio.windows_together), 1)
            parts.append(self._rows_of_windows(state, window, num_windows, first, last))
            start += num_windows * (last - first)
        return joined(parts)

    def _rows_of_windows(self, state: AudioState, window: int, count: int, first: int, last: int) -> Tensor:
        """Return the rows [first, last) of each of `count` windows from `window` on: [n, hidden]."""

        def frames(low: int, high: int) -> Tensor:
            return self._frames(state, window, count, low, high)

        return self.embed(self._convolutions.outputs(frames, first, last), first).flatten(0, 1)

    def _frames(self, state: AudioState, window: int, count: int, low: int, high: int) -> Tensor:
        """Return the frames [low, high) of each of `count` windows from `window` on: [count, mel bins, high − low].
        After the signal's end they are 0."""
        size = self._audio.window_frames
        columns = state.logarithms[:, window * size : (window + count) * size].view(-1, count, size)
        found = normalized(columns[:, :, low:high], state.peak)
        num_missing = (window + count - 1) * size + high - state.num_frames
        if num_missing > 0:
            found[:, -1, max(high - low - num_missing, 0) :] = 0.0
        return found.permute(1, 0, 2)

    def features(self, state: AudioState) -> tuple[Tensor, ...]:
        """Return the rows of each embedding: [num_embeds, rows, hidden]."""
        rows, size = state.kept[self.num_layers], self._audio.rows_per_embed
        return (rows[: len(rows) // size * size].view(-1, size, rows.shape[1]),)
