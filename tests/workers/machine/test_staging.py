"""Staged arrays arrive unchanged and aligned; token copies survive later steps."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from tokenloom.workers.device.token_copy import AsyncTokenCopy, PendingTokens
from tokenloom.workers.machine.staging import Staging

CPU = torch.device("cpu")


def test_sent_arrays_keep_values_shapes_and_dtypes() -> None:
    staging, rng = Staging(CPU), np.random.default_rng(0)
    sent = []
    received = []
    for size in (3, 0, 50_000, 7):
        arrays: list[Any] = [
            rng.integers(0, 100, size).astype(np.int32),
            rng.normal(size=(size, 2)),
            rng.normal(size=5).astype(np.float32)[::2],
            rng.integers(0, 1 << 40, size + 1),
        ]
        sent.append(arrays)
        received.append(staging.send(arrays))
    for arrays, tensors in zip(sent, received, strict=True):
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.shape == array.shape
            assert not tensor.numel() or tensor.data_ptr() % 16 == 0
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_tokens_are_copied_before_a_later_step_overwrites_them() -> None:
    returned, sampled = AsyncTokenCopy(4, CPU), torch.zeros(4, dtype=torch.int64)
    flights = []
    for step in range(3):
        sampled.fill_(step)
        flights.append(returned.send(sampled[: 4 - step]))
    sampled.fill_(-1)
    for step, flight in enumerate(flights):
        assert flight.is_here
        assert flight.take().tolist() == [step] * (4 - step)


def test_a_waiting_thread_selects_the_device_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any call of CUDA's runtime makes a context on the device that the thread has, which is the first if it chose
    none: of 0.5 GB, where another rank has measured and filled its memory."""
    chosen = threading.local()
    waited: list[torch.device | None] = []

    class Event:
        def synchronize(self) -> None:
            waited.append(getattr(chosen, "device", None))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(chosen, "device", device))
    flight = AsyncTokenCopy(2, CPU).send(torch.tensor([7]))
    flight = PendingTokens(flight._slot, Event(), 1, [])  # type: ignore[arg-type]
    thread = threading.Thread(target=flight.wait)
    thread.start()
    thread.join()
    assert waited == [CPU]
    assert flight.take().tolist() == [7]
