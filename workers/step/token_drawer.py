"""TokenDrawer: draws the tokens of a step from its logits: mask → processors → Sampler → logprobs.

Draws of a row with drafts are independent, unless the row has processors: these need the tokens before each draw, so
such a row draws token by token, until one differs from its draft.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...ipc.messages.workers import RowLogprobs, TokenMask
from ..machine.arrays import I32, I64, Bools
from ..sampling.drafts import NO_DRAFT, num_kept
from ..sampling.logits_processors import apply_processors
from ..sampling.logprobs import score_tokens, to_columns
from ..sampling.sampler import Sampler
from ..sampling.token_mask import apply_mask, mask_counts
from .step_inputs import StepInputs
from .step_layout import SamplingMetadata


class Drawn(NamedTuple):
    """Draws of a step's s sampled positions."""

    token_ids: I64  # [s]; NO_DRAFT: not kept
    fully_masked_rows: I32  # mask and processors leave no token
    logprobs: RowLogprobs | None  # of kept tokens of the rows that asked for them


class TokenDrawer:
    """Drawer of tokens for any mix of rows. It keeps no state of rows between calls."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self._sampler = sampler
        self._scratch = torch.empty(0, device=device)

    def draw(self, logits: Tensor, inputs: StepInputs, metadata: SamplingMetadata, mask: TokenMask | None) -> Drawn:
        """Draw the tokens of a step, and score those that its rows keep. Processors are given the drafts that their
        rows keep.

        logits: [s, vocab] float32; mask and processors may overwrite them. metadata: of `inputs.sampled_rows`.
        """
        rows, original = inputs.sampled_rows, logits
        has_rules = bool(metadata.processors) or mask is not None
        if has_rules:
            logits = self._copy(logits) if len(metadata.logprob_indices) else logits.contiguous()
        if mask is not None:
            apply_mask(logits, rows, mask)
        if inputs.drafts is None:
            if metadata.processors:
                apply_processors(logits, metadata.processors)
            token_ids = self._sampler.sample(logits, metadata.sampling, inputs.sampled_positions)
            is_masked = _is_masked(logits, token_ids) if has_rules else np.zeros(len(rows), np.bool_)
        else:
            token_ids, is_masked = self._verify(logits, inputs, inputs.drafts, metadata, mask)
        masked_rows = rows[is_masked & (token_ids != NO_DRAFT)]
        return Drawn(token_ids, masked_rows, _logprobs(original, token_ids, inputs, metadata))

    def _verify(
        self, logits: Tensor, inputs: StepInputs, drafts: I32, metadata: SamplingMetadata, mask: TokenMask | None
    ) -> tuple[I64, Bools]:
        """Draw the tokens of a step in which rows have drafts. Return two columns [s], one value per sampled position:
        the draw, NO_DRAFT if it is not kept, and whether mask and processors left it no token."""
        rows, processors = inputs.sampled_rows, metadata.processors
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        ends = np.append(starts[1:], len(rows))
        if mask is not None:
            drafts = _cut_to_masks(drafts, rows, starts, ends, mask_counts(mask))
        drawn: I64 = np.full(len(rows), NO_DRAFT, np.int64)
        is_masked = np.zeros(len(rows), np.bool_)
        has_rules = np.zeros(len(rows), np.bool_)
        has_rules[list(processors)] = True
        is_first = np.zeros(len(rows), np.bool_)
        is_first[starts] = True
        chosen = np.flatnonzero(~has_rules | is_first)
        while len(chosen):
            part = logits[torch.from_numpy(chosen).to(logits.device)]
            ruled = {i: processors[index] for i, index in enumerate(chosen.tolist()) if has_rules[index]}
            if ruled:
                apply_processors(part, ruled)
            token_ids = self._sampler.sample(part, metadata.sampling.take(chosen), inputs.sampled_positions[chosen])
            drawn[chosen], is_masked[chosen] = token_ids, _is_masked(part, token_ids)
            goes_on = has_rules[chosen] & (token_ids == drafts[chosen]) & ~is_masked[chosen]
            for index in chosen[goes_on].tolist():
                processors[index].append(int(drafts[index]))
            chosen = chosen[goes_on] + 1
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            kept = num_kept(drawn[start:end], drafts[start:end], is_masked[start:end])
            drawn[start + kept : end] = NO_DRAFT
        return drawn, is_masked

    def _copy(self, logits: Tensor) -> Tensor:
        """Copy logits to memory that the next call reuses: fresh pages cost more than the copy."""
        if self._scratch.numel() < logits.numel():
            self._scratch = torch.empty(logits.numel(), dtype=logits.dtype, device=logits.device)
        return self._scratch[: logits.numel()].view(logits.shape).copy_(logits)


def _cut_to_masks(drafts: I32, rows: I32, starts: I64, ends: I64, num_masks: dict[int, int]) -> I32:
    """Return the drafts without those whose next draw has no mask."""
    drafts = drafts.copy()
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        drafts[start + num_masks.get(int(rows[start]), end - start) - 1 : end] = NO_DRAFT
    return drafts


def _is_masked(logits: Tensor, token_ids: I64) -> Bools:
    drawn = logits.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])[:, 0]
    is_masked: Bools = drawn.isneginf().cpu().numpy()
    return is_masked


def _logprobs(logits: Tensor, token_ids: I64, inputs: StepInputs, metadata: SamplingMetadata) -> RowLogprobs | None:
    """Score the kept tokens of rows that asked for logprobs. logits: [s, vocab], without mask and processors."""
    indices, targets = metadata.logprob_indices, metadata.logprob_targets
    if inputs.drafts is not None:
        is_kept = token_ids[indices] != NO_DRAFT
        targets = [target for target, kept in zip(targets, is_kept.tolist(), strict=True) if kept]
        indices = indices[is_kept]
    if not len(indices):
        return None
    if len(indices) < len(token_ids):
        logits = logits[torch.from_numpy(indices).to(logits.device)]
    scored = score_tokens(logits, token_ids[indices], targets)
    return to_columns(scored, inputs.sampled_rows[indices].tolist(), inputs.sampled_positions[indices].tolist())
