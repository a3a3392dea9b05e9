"""Dummy steps, which measure the memory of the largest step, or warm up. They read the null block and write nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...ipc.messages.workers import RowSampling
from ...ipc.spec.config.engine_spec import EngineSpec
from ...kernels.contract import StateViews
from ..sampling.logprobs import score_tokens
from ..sampling.sampler import Sampler
from ..sampling.sampling_columns import SamplingColumns
from .model_step import Model, compute
from .step_inputs import GroupInputs, StateInputs, StepInputs


class StepLimits(NamedTuple):
    """Limits of the size of a step."""

    max_num_seqs: int
    max_num_tokens: int  # of all rows
    max_model_len: int  # tokens of a row, with those before the step

    @classmethod
    def of(cls, spec: EngineSpec) -> StepLimits:
        return cls(spec.config.max_num_seqs, spec.max_num_batched_tokens, spec.max_text_len)


def dummy_step(
    counts: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    num_groups: int = 1,
    *,
    has_states: bool = False,
    is_encoder: bool = False,
) -> StepInputs:
    """Make a step that computes the last `counts[i]` tokens of a row of `seq_lens[i]` for each i; all rows sample, or
    none of an encoder. num_groups: KV groups with keys and values. has_states: layers keep a state."""
    no_blocks = np.full(len(counts), -1, np.int32)
    num_tokens = sum(counts)
    query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    spans = [np.arange(length - count, length) for count, length in zip(counts, seq_lens, strict=True)]
    rows = np.arange(len(counts), dtype=np.int32)
    tables = np.zeros((len(counts), -(-max(seq_lens) // block_size)), np.int32)
    num_sampled = 0 if is_encoder else len(counts)
    see_until = np.repeat(np.array(seq_lens, np.int32) - 1, counts) if is_encoder else None
    return StepInputs(
        rows=rows,
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.concatenate(spans).astype(np.int64),
        query_starts=query_starts,
        seq_lens=np.array(seq_lens, np.int32),
        groups=[GroupInputs(np.full(num_tokens, -1, np.int64), tables, see_until=see_until)] * num_groups,
        num_decode_rows=len(counts) if max(counts) == 1 else 0,
        sampled_rows=rows[:num_sampled],
        sampled_positions=np.array(seq_lens, np.int64)[:num_sampled],
        sampled_tokens=query_starts[1:][:num_sampled].astype(np.int64) - 1,
        states=StateInputs(query_starts, no_blocks, no_blocks) if has_states else None,
    )


def largest_steps(
    limits: StepLimits,
    block_size: int,
    num_groups: int = 1,
    *,
    has_states: bool = False,
    is_encoder: bool = False,
) -> Iterator[StepInputs]:
    """Yield the two steps that need most memory: the last chunk of the longest prompt, and the most rows at once."""
    count = min(limits.max_num_tokens, limits.max_model_len)
    length = count if is_encoder else limits.max_model_len
    yield dummy_step([count], [length], block_size, num_groups, has_states=has_states, is_encoder=is_encoder)
    num_rows = min(limits.max_num_seqs, limits.max_num_tokens)
    count = min(limits.max_num_tokens // num_rows, limits.max_model_len)
    counts = [count] * num_rows
    yield dummy_step(counts, counts, block_size, num_groups, has_states=has_states, is_encoder=is_encoder)


def with_adapters(inputs: StepInputs) -> StepInputs:
    """Return the step with the adapter of slot 1 for all tokens."""
    return inputs._replace(token_slots=np.ones_like(inputs.token_ids))


@torch.inference_mode()
def run_dummy(
    model: Model,
    inputs: StepInputs,
    kv_caches: Sequence[Tensor],
    sampler: Sampler | None,
    sampling: RowSampling | None = None,
    num_logprobs: int | None = None,
    states: StateViews | None = None,
) -> None:
    """Run the step `inputs`, sample, and drop the tokens. `sampler`: None on a rank that does not sample.

    num_logprobs: copy the logits, as for processors, and score this number of most likely tokens beside each sampled
    one; None: do neither.
    """
    _, logits = compute(model, inputs, kv_caches, states, keeps_state=False)
    if sampler is not None and len(inputs.sampled_rows):
        columns = SamplingColumns.greedy(len(inputs.sampled_rows))
        for row in inputs.sampled_rows:
            columns.put(int(row), sampling or RowSampling())
        processed = logits if num_logprobs is None else logits.clone()
        token_ids = sampler.sample(processed, columns, inputs.sampled_positions)
        if num_logprobs is not None:
            score_tokens(logits, token_ids, [num_logprobs] * len(token_ids))


def activation_bytes(
    model: Model,
    steps: Iterator[StepInputs],
    kv_caches: Sequence[Tensor],
    sampler: Sampler | None,
    max_logprobs: int,
    states: StateViews | None = None,
) -> int:
    """Run `steps` with top_p and `max_logprobs`; return their peak CUDA memory above the current allocation."""
    sampling = RowSampling(top_p=0.9)
    device = kv_caches[0].device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for inputs in steps:
        run_dummy(model, inputs, kv_caches, sampler, sampling, max_logprobs, states)
    return torch.cuda.max_memory_allocated(device) - before
