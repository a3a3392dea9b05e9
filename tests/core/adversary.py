"""An adversary that proposes drafts without regard to their cost: right, wrong, long, short, beyond every limit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tokenloom.core.request import Ids, Request
from tokenloom.core.scheduling.drafting import Draft
from tokenloom.core.scheduling.step.rows import Rows
from tokenloom.ipc.spec.config.speculation import MAX_DRAFTS
from tokenloom.tests.core.fake_worker import VOCAB_SIZE, next_token


def right_tokens(request: Request, tokens: list[int], count: int) -> list[int]:
    """The tokens that the FakeWorker draws next, if no mask forbids them."""
    adapter, tokens = b"" if request.adapter is None else request.adapter.digest, list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, request.seed, adapter))
    return tokens[len(tokens) - count :]


class Adversary:
    """A Proposer for every row. accuracy: how often a draft is right."""

    def __init__(
        self,
        rng: random.Random,
        accuracy: float,
        right: Callable[[Request, list[int], int], list[int]] = right_tokens,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._rng, self._accuracy, self._right, self._vocab_size = rng, accuracy, right, vocab_size
        self.num_drafts = 0

    may_propose = True
    num_expected, num_corpus_tokens = 0.0, 0

    def holds_next_step(self, rows: Rows) -> bool:
        return self._rng.random() < 0.7

    def propose(self, rows: Rows, limits: Ids) -> Mapping[int, Draft]:
        drafts = {}
        for row in limits.nonzero()[0].tolist():
            request, num_tokens = rows.request(row), int(rows.num_tokens[row])
            count = self._rng.randrange(MAX_DRAFTS + 5)  # more than a row may have
            if count:
                token_ids = [
                    token if self._rng.random() < self._accuracy else self._wrong(token)
                    for token in self._right(request, rows.tokens[row, :num_tokens].tolist(), count)
                ]
                drafts[row] = Draft("own", token_ids)
                self.num_drafts += count
        return drafts

    def _wrong(self, token: int) -> int:
        return (token + self._rng.randrange(1, self._vocab_size)) % self._vocab_size
