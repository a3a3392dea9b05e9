"""AsyncTokenCopy: copies sampled tokens to the host on its own stream, so that the next step need not wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..machine.arrays import I64


@dataclass(eq=False)
class _Slot:
    """Memory for one step's tokens: a copy that no graph overwrites, and its target on the host."""

    on_device: Tensor
    on_host: Tensor


class PendingCopy:
    """A copy between the device and the host that may still be running."""

    def __init__(self, event: torch.cuda.Event | None, device: torch.device) -> None:
        self._event, self._device = event, device  # recorded after the copy; None where the device is the host

    @classmethod
    def on_stream(cls, device: torch.device) -> PendingCopy | None:
        """Return a PendingCopy of all copies started so far on the current stream of `device`; None if it is the
        host."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread sleeps
        event.record()
        return cls(event, device)

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the copy ends; any thread may call it."""
        if self._event is not None:
            # A thread without a current device would create a context of 0.5 GB on the first one.
            torch.cuda.set_device(self._device)
            self._event.synchronize()


class PendingTokens(PendingCopy):
    """The tokens of one step while they are copied to the host."""

    def __init__(self, slot: _Slot, event: torch.cuda.Event | None, num_tokens: int, free: list[_Slot]) -> None:
        super().__init__(event, slot.on_device.device)
        self._slot = slot
        self._num_tokens = num_tokens
        self._free = free

    def take(self) -> I64:
        """Wait for the tokens [n] and return them. Must be called once."""
        self.wait()
        token_ids: I64 = self._slot.on_host[: self._num_tokens].numpy().copy()
        self._free.append(self._slot)
        return token_ids


class AsyncTokenCopy:
    """Owner of the CUDA stream of the copies, and of a reusable buffer for each step in flight."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._free: list[_Slot] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, token_ids: Tensor) -> PendingTokens:
        """Start to copy token_ids [n] int64 to the host, and return the pending copy. Work that is launched later may
        overwrite `token_ids`."""
        slot = self._free.pop() if self._free else self._new_slot()
        num_tokens = len(token_ids)
        source, target = slot.on_device[:num_tokens], slot.on_host[:num_tokens]
        source.copy_(token_ids)
        event: torch.cuda.Event | None = None
        if self._stream is None:
            target.copy_(source)
        else:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread sleeps
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                event.record()
        return PendingTokens(slot, event, num_tokens, self._free)

    def _new_slot(self) -> _Slot:
        is_pinned = self._stream is not None
        return _Slot(
            torch.zeros(self._max_num_seqs, dtype=torch.int64, device=self._device),
            torch.zeros(self._max_num_seqs, dtype=torch.int64, pin_memory=is_pinned),
        )
