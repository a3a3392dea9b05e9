"""Windows of tokens for the training of a draft head: texts packed side by side, and the model's states of them.

A text is a prompt and the model's answer. Windows have equal lengths; a text lies in one window and sees itself alone.
The states of all tokens lie in files that are mapped, as bfloat16: 8 × hidden_size bytes a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenloom.scripts.train.draft_head import Places
from tokenloom.scripts.train.draft_target import States, Target

PAD, PROMPT, SAMPLED, GREEDY = range(4)  # kinds of tokens


class Text(NamedTuple):
    """A prompt, the model's answer to it, and whether that was greedy."""

    prompt: list[int]
    answer: list[int]
    is_greedy: bool


class Windows(NamedTuple):
    """Windows of tokens, each [num_windows, length]."""

    ids: Tensor
    texts: Tensor  # number of the text in the window, -1 without one
    positions: Tensor  # in the text
    kinds: Tensor

    def part(self, start: int, stop: int) -> Windows:
        return Windows(*(each[start:stop] for each in self))

    def places(self) -> Places:
        length = self.ids.shape[1]
        own = self.texts[:, None, :, None] == self.texts[:, None, None, :]
        return Places(self.positions, own & torch.ones(length, length, dtype=torch.bool).tril())

    def later(self, column: Tensor, distance: int, fill: int) -> Tensor:
        """Return the column's values `distance` tokens later, `fill` behind the end of a text."""
        moved = torch.full_like(column, fill)
        moved[:, :-distance] = column[:, distance:]
        is_same = torch.zeros_like(self.texts, dtype=torch.bool)
        is_same[:, :-distance] = self.texts[:, :-distance] == self.texts[:, distance:]
        return moved.masked_fill(~is_same, fill)


def pack(texts: Sequence[Text], length: int) -> Windows:
    """Put the texts into as few windows as first fit finds, long ones first. Longer texts are cut."""
    rows: list[list[Text]] = []
    free: list[int] = []
    for text in sorted(texts, key=lambda each: -len(each.prompt) - len(each.answer)):
        size = min(len(text.prompt) + len(text.answer), length)
        index = next((index for index, room in enumerate(free) if room >= size), len(rows))
        if index == len(rows):
            rows.append([])
            free.append(length)
        rows[index].append(text)
        free[index] -= size
    columns = [torch.zeros(len(rows), length, dtype=torch.int64) for _ in Windows._fields]
    windows = Windows(*columns)
    windows.texts.fill_(-1)
    for row, members in enumerate(rows):
        start = 0
        for number, text in enumerate(members):
            ids = (text.prompt + text.answer)[:length]
            stop = start + len(ids)
            windows.ids[row, start:stop] = torch.tensor(ids)
            windows.texts[row, start:stop] = number
            windows.positions[row, start:stop] = torch.arange(len(ids))
            windows.kinds[row, start:stop] = PROMPT
            windows.kinds[row, start + len(text.prompt) : stop] = GREEDY if text.is_greedy else SAMPLED
            start = stop
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return Windows(*(each[order] for each in windows))


class StateFile:
    """The states of windows in two mapped files, written once and read often. Those of an earlier run with the same
    windows are kept."""

    def __init__(self, folder: Path, windows: Windows, hidden_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shape = windows.ids.shape
        key = hashlib.sha256(windows.ids.numpy().tobytes()).hexdigest()
        self._done = folder / f"done-{key[:16]}-{hidden_size}"
        is_known = self._done.exists()
        self.num_windows = int(self._done.read_text(encoding="ascii")) if is_known else 0  # with states
        self._aux = _mapped(folder / "aux.bin", is_known, *shape, 3 * hidden_size)
        self._last = _mapped(folder / "last.bin", is_known, *shape, hidden_size)
        if not is_known:
            for other in folder.glob("done-*"):
                other.unlink()

    def add(self, target: Target, windows: Windows, at_once: int) -> None:
        """Compute and append the states of the next `at_once` windows."""
        start = self.num_windows
        stop = min(start + at_once, len(windows.ids))
        part = windows.part(start, stop)
        aux, last = target.states(part.ids, part.places())
        self._aux[start:stop] = aux
        self._last[start:stop] = last
        self.num_windows = stop
        self._done.write_text(str(stop), encoding="ascii")

    def read(self, chosen: Tensor) -> States:
        """Return the states of the chosen windows as float32."""
        return States(self._aux[chosen].float(), self._last[chosen].float())


def _mapped(path: Path, is_kept: bool, *shape: int) -> Tensor:
    if not is_kept:
        path.unlink(missing_ok=True)
    size = torch.Size(shape).numel()
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(shape)
