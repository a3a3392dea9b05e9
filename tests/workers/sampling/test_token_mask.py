"""A mask keeps the tokens with set bits in its rows and changes no other row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.workers import TokenMask
from tokenloom.workers.sampling.token_mask import apply_mask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def mask_of(rows: list[int], allowed: np.ndarray) -> TokenMask:
    """allowed: [n, vocab] bool."""
    padded = np.zeros((len(rows), -(-allowed.shape[1] // 32) * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").tobytes()
    return TokenMask(step=1, core_epoch=0, generation=0, rows=np.array(rows, np.int32).tobytes(), bits=bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 257, 1013])
def test_only_masked_rows_change_and_only_where_forbidden(vocab_size: int, device: str) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(size=(6, vocab_size)).astype(np.float32)).to(device)
    before = logits.cpu().numpy().copy()
    sampled_rows = np.array([7, 3, 9, 0, 4, 12], np.int32)
    allowed = rng.random((3, vocab_size)) < 0.3
    apply_mask(logits, sampled_rows, mask_of([9, 5, 7], allowed))  # row 5 is not sampled here
    expected = before.copy()
    expected[2][~allowed[0]] = -np.inf
    expected[0][~allowed[2]] = -np.inf
    np.testing.assert_array_equal(logits.cpu().numpy(), expected)


def test_a_mask_of_another_width_is_refused() -> None:
    mask = mask_of([0], np.ones((1, 100), np.bool_))
    with pytest.raises(ProtocolError, match="16 bytes for 1 masks of 200 tokens"):
        apply_mask(torch.zeros(1, 200), np.array([0], np.int32), mask)


def test_an_empty_mask_changes_nothing() -> None:
    logits = torch.zeros(2, 50)
    apply_mask(logits, np.array([0, 1], np.int32), mask_of([], np.zeros((0, 50), np.bool_)))
    assert not logits.any()
