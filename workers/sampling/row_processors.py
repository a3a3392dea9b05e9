"""RowProcessors: the changes to one row's logits before sampling: allowed, banned and forced tokens, biases, penalties,
custom processors and the model's own rules.

Their state is made from the row's parameters and tokens, so that it is the same if the row is resumed after a
preemption or a restart, and updated with each output token.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ProtocolError
from ...ipc.messages.workers import NewRow, RowSampling
from ...ipc.spec.models.model_config import OutputRules
from ..machine.arrays import F32, I32, I64
from .thinking import ThinkingBudget, positions_after
from .timestamps import Timestamps

# (prompt token ids, output token ids, logits [vocab] float32) → logits [vocab]; may change its argument in place.
# A processor with a parameter named extra_args receives the extra_args of the request.
CustomLogitsProcessor: TypeAlias = Callable[..., Tensor]


def needs_processors(sampling: RowSampling) -> bool:
    """Return whether anything other than temperature and filters changes the row's logits."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
        or sampling.bias_ids
        or sampling.allowed_token_ids
        or sampling.bad_words
        or (sampling.min_tokens and sampling.stop_token_ids)
        or sampling.logits_processors
        or sampling.thought_markers
        or sampling.trace_token_ids
    )


class RowProcessors:
    """Processors of one row. Invariant: `outputs` are the row's output tokens, given to the constructor and to
    `append`. The constructor raises ProtocolError for ids outside the vocabulary, or if there are not as many biases as
    ids."""

    def __init__(
        self,
        new_row: NewRow,
        processors: Sequence[CustomLogitsProcessor],
        vocab_size: int,
        rules: OutputRules | None = None,
    ) -> None:
        self.sampling = sampling = new_row.sampling
        tokens = np.frombuffer(new_row.token_ids, np.int32)
        prompt, outputs = tokens[: new_row.num_prompt_tokens], tokens[new_row.num_prompt_tokens :]
        self.outputs: list[int] = outputs.tolist()
        has_penalty = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        self.counts = TokenCounts(prompt, outputs) if has_penalty else None
        self.bias_ids = ids_in(sampling.bias_ids, vocab_size)
        self.bias_values: F32 = np.frombuffer(sampling.bias_values, np.float32)
        self.allowed = ids_in(sampling.allowed_token_ids, vocab_size)
        self._stop_ids = ids_in(sampling.stop_token_ids, vocab_size)
        words = [ids_in(frame, vocab_size).tolist() for frame in sampling.bad_words]
        rules = rules or OutputRules()
        bad_ids = [*(word[0] for word in words if len(word) == 1), *rules.suppressed_ids]
        self._bad_ids: I64 = np.array(bad_ids, np.int64)
        self._bad_first_ids: I64 = np.array(rules.first_suppressed_ids, np.int64)
        has_timestamps = rules.no_timestamps_id is not None and rules.no_timestamps_id not in prompt
        is_choice = len(self.allowed) > 0  # a choice between tokens that the caller names, such as languages
        self.timestamps = Timestamps(rules, self.outputs) if has_timestamps and not is_choice else None
        self._bad_words: dict[int, list[list[int]]] = defaultdict(list)  # by the last token before the banned one
        for word in words:
            if len(word) > 1:
                self._bad_words[word[-2]].append(word)
        self._prompt: list[int] = prompt.tolist() if sampling.logits_processors else []
        self._processors = [
            _with_arguments(processors[index], sampling.extra_args) for index in sampling.logits_processors
        ]
        self.thinking: ThinkingBudget | None = None
        if sampling.thought_markers:
            begin, end = (ids_in(frame, vocab_size).tolist() for frame in sampling.thought_markers)
            stops = [ids_in(frame, vocab_size).tolist() for frame in sampling.constraint_begins]
            if not any(len(positions_after(outputs, stop)) for stop in stops):
                self.thinking = ThinkingBudget(
                    sampling.thinking_token_budget, begin, end, tokens, stops, new_row.num_prompt_tokens
                )
        self._trace: list[int] = ids_in(sampling.trace_token_ids, vocab_size).tolist()
        if len(self.bias_ids) != len(self.bias_values):
            raise ProtocolError(f"row {new_row.row} has {len(self.bias_ids)} bias ids, {len(self.bias_values)} values")

    def append(self, token_id: int) -> None:
        """Append a token to the output."""
        self.outputs.append(token_id)
        if self.counts is not None:
            self.counts.append(token_id)
        if self.timestamps is not None:
            self.timestamps.append(token_id)
        if self.thinking is not None:
            is_over = self.thinking.append(token_id)
            if is_over:
                self.thinking = None

    def banned(self) -> I64:
        """Return the banned next ids: those that the model suppresses, those that complete bad words, and stop tokens
        before min_tokens."""
        banned = [self._bad_ids] if self.outputs else [self._bad_ids, self._bad_first_ids]
        if self._bad_words and self.outputs:
            words = self._bad_words.get(self.outputs[-1], ())
            ends = [word[-1] for word in words if self.outputs[1 - len(word) :] == word[:-1]]
            banned.append(np.array(ends, np.int64))
        if len(self.outputs) < self.sampling.min_tokens:
            banned.append(self._stop_ids)
        return np.concatenate(banned)

    def forced(self, logits: Tensor) -> int | None:
        """Return the only allowed next token, from a trace or the end marker of reasoning; None if none is forced.

        `logits`: [vocab], as a grammar's mask leaves them. The end of reasoning waits for a place where the mask allows
        it: a token may end amid a character."""
        if len(self.outputs) < len(self._trace):
            return self._trace[len(self.outputs)]
        token_id = None if self.thinking is None else self.thinking.forced()
        if token_id is None or logits[token_id] == -torch.inf:
            return None
        return token_id

    def process(self, logits: Tensor) -> None:
        """Run the custom processors on the row's logits [vocab], in place."""
        for processor in self._processors:
            logits.copy_(processor(self._prompt, self.outputs, logits))


def _with_arguments(processor: CustomLogitsProcessor, extra_args: dict[str, object]) -> CustomLogitsProcessor:
    try:
        takes_them = "extra_args" in inspect.signature(processor).parameters
    except ValueError:  # not written in Python
        takes_them = False
    return partial(processor, extra_args=extra_args) if takes_them else processor


def ids_in(frame: bytes, vocab_size: int) -> I64:
    """Decode token ids in a row's parameters. ProtocolError for ids outside the vocabulary."""
    ids = np.frombuffer(frame, np.int32).astype(np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ProtocolError(f"a row's parameters name the tokens [{ids.min()}, {ids.max()}], ids are [0, {vocab_size})")
    return ids


class TokenCounts:
    """The distinct tokens of a row: `token_ids[i]` occurs `counts[i]` times in the output; 0: only in the prompt.

    Sparse, so that the time of a step depends on the number of distinct tokens, not on the vocabulary."""

    def __init__(self, prompt: I32, outputs: I32) -> None:
        distinct = np.unique(np.concatenate([prompt, outputs]))
        self._size = len(distinct)
        self._token_ids: I64 = np.zeros(self._size + 64, np.int64)
        self._counts: F32 = np.zeros(self._size + 64, np.float32)
        self._token_ids[: self._size] = distinct
        self._counts[: self._size] = np.bincount(np.searchsorted(distinct, outputs), minlength=self._size)
        self._index_by_token = dict(zip(distinct.tolist(), range(self._size), strict=True))

    @property
    def token_ids(self) -> I64:
        return self._token_ids[: self._size]

    @property
    def counts(self) -> F32:
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        """Count a token of the output, sampled or forced."""
        index = self._index_by_token.get(token_id)
        if index is None:
            index = self._index_by_token[token_id] = self._size
            if index == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[index] = token_id
            self._size += 1
        self._counts[index] += 1
