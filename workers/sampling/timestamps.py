"""Timestamps: the rules by which a model that transcribes marks the times of its segments.

Tokens from `first_id` on are times, in steps of 20 ms. An answer begins with a time. After that times come in pairs,
the end of a segment and the start of the next, except at the answer's end. Times never decrease. If all times together
are more likely than any other token, a time is next (Radford et al., arXiv 2212.04356). The state depends only on the
row's tokens, so a row that is resumed after a preemption or a restart continues unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import OutputRules


class Timestamps:
    """State of the timestamps in one row's answer."""

    def __init__(self, rules: OutputRules, outputs: Sequence[int]) -> None:
        assert rules.no_timestamps_id is not None
        self.first_id = rules.no_timestamps_id + 1
        self._rules = rules
        self._num_outputs = 0
        self._last: int | None = None  # the last time
        self._are_times = (True, True)  # whether the last two tokens are times; before the answer, as if they were
        for token_id in outputs:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Append a token of the answer."""
        is_time = token_id >= self.first_id
        self._num_outputs += 1
        self._are_times = (self._are_times[1], is_time)
        if is_time:
            self._last = token_id

    def forbidden(self, vocab_size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of ids that may not come next."""
        first, (was_time, is_time) = self.first_id, self._are_times
        yield first - 1, first
        if not self._num_outputs:
            yield 0, first
            if self._rules.max_first_timestamp is not None:
                yield min(first + self._rules.max_first_timestamp + 1, vocab_size), vocab_size
            return
        if is_time and was_time:  # a segment has begun: text must follow
            yield first, vocab_size
        elif is_time:  # a segment has ended: the start of the next must follow, or the answer's end
            yield 0, self._rules.end_id
        if self._last is not None:
            yield first, self._last + (not is_time)


def apply_timestamps(logits: Tensor, states: dict[int, Timestamps]) -> None:
    """Set the logits [n, vocab] float32 of ids that may not come next to −∞, in place. states: by index of the logits'
    row."""
    if not states:
        return
    for i, state in states.items():
        for start, stop in state.forbidden(logits.shape[1]):
            logits[i, start:stop] = -torch.inf
    first = next(iter(states.values())).first_id  # the same for all rows, as they have one model
    index = torch.tensor(list(states), device=logits.device)
    chosen = logits if len(states) == len(logits) else logits[index]
    is_time = chosen[:, first:].logsumexp(dim=-1) > chosen[:, :first].amax(dim=-1)
    logits[index[is_time], :first] = -torch.inf
