"""Sampler: samples the token of each row from its logits.

The token is argmax(logit / T − log E) over the tokens that pass the filters, of equal ones that with the lowest id; E
is the noise of `kernels/noise.py`, keyed by seed, token and position, so that a sample does not depend on batch, step
or process. With T below MIN_TEMPERATURE the token is argmax(logit).

On a GPU one kernel samples (`kernels/gpu/sampling/sampling.py`). On the host most tokens cannot win with any noise:
`candidates.py` lists the others in float32; here these are filtered, scored in double precision and compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...kernels import noise
from ...kernels.cpu.sampling import CpuSampling, load_cpu_sampling
from ..machine.arrays import F32, I64
from ..machine.staging import Staging
from .candidates import Candidates, RowDraw, find_candidates
from .sampling_columns import MIN_TEMPERATURE, SamplingColumns


def select_sampler(
    device: torch.device, enforce_reference: bool, spare_folder: Path | None = None, cpu_isa: str = "auto"
) -> Sampler:
    """Return the fastest sampler for logits on `device`. Arguments are those of `select_ops`. Raises ValueError if the
    processor lacks `cpu_isa`."""
    if enforce_reference:
        return Sampler()
    if device.type == "cuda":
        return Sampler(is_on_device=True)
    return Sampler(load_cpu_sampling(spare_folder, cpu_isa))


class Sampler:
    """Sampler of any mix of rows, each with its own parameters. Keeps no state of rows between calls."""

    def __init__(self, kernels: CpuSampling | None = None, is_on_device: bool = False) -> None:
        """`kernels`: used on the host instead of numpy. `is_on_device`: a Triton kernel samples. All give the same
        tokens, unless the best scores are equal within the rounding of a double."""
        self._kernels = kernels
        self._is_on_device = is_on_device
        self._staging: Staging | None = None

    def sample(self, logits: Tensor, columns: SamplingColumns, positions: I64) -> I64:
        """Sample one token for each row; return [n] token ids.

        logits: [n, vocab] float32, left unchanged. columns: parameters of the n rows. positions: [n], index in prompt +
        output of the token to sample. A row whose largest logit is NaN or infinite gets the id of that logit; this does
        not affect other rows.
        """
        if self._is_on_device:
            return self._sample_on_device(logits, columns, positions)
        if logits.is_cuda:
            logits = logits.cpu()
        tokens: I64 = np.argmax(logits.numpy(), axis=-1)  # torch's argmax is not vectorised
        if columns.is_greedy:
            return tokens
        largest: F32 = logits.numpy()[np.arange(len(tokens)), tokens]
        drawn = np.flatnonzero((columns.temperature >= MIN_TEMPERATURE) & np.isfinite(largest))
        if len(drawn) == 0:
            return tokens
        draws = _row_draws(drawn, tokens[drawn], largest[drawn], columns.take(drawn), positions[drawn], logits.shape[1])
        with np.errstate(over="ignore"):  # ±1e38 divided by a small temperature is infinite
            found = zip(find_candidates(logits, draws, self._kernels), draws, strict=True)
            tokens[drawn] = _best([candidates.filtered(draw) for candidates, draw in found], draws)
        return tokens

    def _sample_on_device(self, logits: Tensor, columns: SamplingColumns, positions: I64) -> I64:
        """Sample on the device, and wait for the tokens."""
        from ...kernels.gpu.sampling.sampling import sample

        if self._staging is None:
            self._staging = Staging(logits.device)
        arrays = (np.arange(len(positions)), *columns.arrays, positions.astype(np.int32))
        row_ids, *drawing, next_positions = self._staging.send(arrays)
        tokens: I64 = sample(logits.contiguous(), row_ids, drawing, next_positions).cpu().numpy()
        return tokens


def _row_draws(
    rows: I64, best_ids: I64, largest: F32, columns: SamplingColumns, positions: I64, vocab_size: int
) -> list[RowDraw]:
    reached = noise.gumbel(noise.token_bits(best_ids, positions, columns.seeds))
    values = zip(
        rows.tolist(),
        positions.tolist(),
        columns.temperature,
        np.where(columns.top_k < vocab_size, np.maximum(columns.top_k, 0), 0).tolist(),
        columns.top_p.tolist(),
        columns.min_p.tolist(),
        columns.seeds,
        largest,
        reached.tolist(),
        strict=True,
    )
    return [RowDraw(*value) for value in values]


def _best(found: list[Candidates], draws: list[RowDraw]) -> I64:
    """Return the candidate of each row with the highest score, of equal ones that with the lowest id: [n]."""
    rows = np.repeat(np.arange(len(draws)), [len(candidates.token_ids) for candidates in found])
    token_ids = np.concatenate([candidates.token_ids for candidates in found])
    logits = np.concatenate([candidates.logits for candidates in found])
    positions = np.array([draw.position for draw in draws])
    bits = noise.token_bits(token_ids, positions[rows], np.array([draw.seed for draw in draws])[rows])
    most_bits = np.concatenate(
        [draw.most_bits(candidates.logits) for draw, candidates in zip(draws, found, strict=True)]
    )
    rises = np.flatnonzero(bits <= most_bits)  # only these few need two logarithms
    rows, token_ids, logits, bits = rows[rises], token_ids[rises], logits[rises], bits[rises]
    temperatures = np.array([draw.temperature for draw in draws])
    scores = (logits / temperatures[rows]).astype(np.float64) + noise.gumbel(bits)
    order = np.lexsort((token_ids, -scores, rows))
    return token_ids[order[np.flatnonzero(np.diff(rows[order], prepend=-1))]]
