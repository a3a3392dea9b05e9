"""Timestamps: the rules by which a model that transcribes marks the times of its segments.

Tokens from `first_id` on are times, in steps of 20 ms. An answer begins with one; they come in pairs, the end of a
segment and the begin of the next, but for the last; they never fall; and where times together are likelier than any
other token, a time comes (Radford et al., arXiv 2212.04356). The state follows from a row's tokens alone, so a row
resumed after a preemption or a restart continues unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import OutputRules


class Timestamps:
    """Where the answer of one row stands in its timestamps."""

    def __init__(self, rules: OutputRules, outputs: Sequence[int]) -> None:
        assert rules.no_timestamps_id is not None
        self.first_id = rules.no_timestamps_id + 1
        self._rules = rules
        self._num_outputs = 0
        self._last: int | None = None  # timestamp
        self._are_times = (True, True)  # the last but one token and the last, as of an answer that nothing precedes
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
        """Yield ranges of ids of which none may come next."""
        first, (was_time, is_time) = self.first_id, self._are_times
        yield first - 1, first
        if not self._num_outputs:
            yield 0, first
            if self._rules.max_first_timestamp is not None:
                yield min(first + self._rules.max_first_timestamp + 1, vocab_size), vocab_size
            return
        if is_time and was_time:  # a segment has begun: text must follow
            yield first, vocab_size
        elif is_time:  # a segment has ended: the begin of the next must follow, or the answer's end
            yield 0, self._rules.end_id
        if self._last is not None:
            yield first, self._last + (not is_time)


def apply_timestamps(logits: Tensor, states: dict[int, Timestamps]) -> None:
    """Change logits [n, vocab] float32 of the rows with these states, in place: ids that may not come become −∞."""
    if not states:
        return
    for i, state in states.items():
        for start, stop in state.forbidden(logits.shape[1]):
            logits[i, start:stop] = -torch.inf
    first = next(iter(states.values())).first_id  # of all rows, which are of one model
    index = torch.tensor(list(states), device=logits.device)
    chosen = logits if len(states) == len(logits) else logits[index]
    is_time = chosen[:, first:].logsumexp(dim=-1) > chosen[:, :first].amax(dim=-1)
    logits[index[is_time], :first] = -torch.inf
