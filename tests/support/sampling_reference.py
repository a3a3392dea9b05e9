"""Reference for every sampling parameter, in plain numpy over one row of logits: no sparse index, pruning or state.

Written from vLLM's documentation of its order of operations; used by the tests of workers and of whole engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenloom.kernels.noise import gumbel, vocabulary_bits

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Wanted:
    """The parameters of one request, resolved to token ids."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    processor: Callable[[Sequence[int], Sequence[int], F64], F64] | None = None


def processed(logits: F64, prompt: Sequence[int], outputs: Sequence[int], wanted: Wanted) -> F64:
    """Apply steps 2 to 7 of SamplingParams' order. logits: [vocab]."""
    logits = np.array(logits, np.float64)
    if wanted.allowed_token_ids:
        logits = np.where(np.isin(np.arange(len(logits)), list(wanted.allowed_token_ids)), logits, -np.inf)
    for word in wanted.bad_words:
        *before, last = word
        if list(outputs[len(outputs) - len(before) :]) == before:
            logits[last] = -np.inf
    if len(outputs) < wanted.min_tokens:
        logits[list(wanted.stop_token_ids)] = -np.inf
    for token_id, bias in wanted.logit_bias.items():
        logits[token_id] += bias
    if wanted.processor is not None:
        logits = wanted.processor(prompt, outputs, logits)
    for token_id in set(prompt) | set(outputs):
        logits[token_id] *= 1 / wanted.repetition_penalty if logits[token_id] > 0 else wanted.repetition_penalty
    for token_id in set(outputs):
        logits[token_id] -= wanted.frequency_penalty * list(outputs).count(token_id) + wanted.presence_penalty
    return logits


def filtered(logits: F64, wanted: Wanted) -> F64:
    """Apply steps 8 and 9 for a temperature above 0: scaled logits, −∞ for removed tokens."""
    scaled = logits / wanted.temperature
    scaled = np.where(np.exp(scaled - scaled.max()) >= wanted.min_p, scaled, -np.inf)
    if 0 < wanted.top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-wanted.top_k], scaled, -np.inf)
    if wanted.top_p < 1:
        falling = np.sort(np.exp(scaled - scaled.max()))[::-1]
        last = int(np.searchsorted(np.cumsum(falling / falling.sum()), wanted.top_p))
        scaled = np.where(np.exp(scaled - scaled.max()) >= falling[min(last, len(falling) - 1)], scaled, -np.inf)
    return scaled


def scores(logits: F64, prompt: Sequence[int], outputs: Sequence[int], wanted: Wanted) -> F64:
    """Return [vocab] scores, whose argmax is the next token."""
    logits = processed(logits, prompt, outputs, wanted)
    if wanted.temperature == 0:
        return logits
    seed = wanted.seed % 2**64
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return filtered(logits, wanted) + gumbel(vocabulary_bits(len(logits), len(prompt) + len(outputs), words))
