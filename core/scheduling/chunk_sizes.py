"""ChunkSizes: limits the tokens of one request in a step, so that other requests have room in it."""

from __future__ import annotations

from ..request import Ids, Request
from .step.rows import Rows
from .step_feature import StepFeatures
from .waiting_queue import WaitingQueue


class ChunkSizes:
    """Limits of the tokens of requests in a step. Reads the rows, the queue and `counts`, the tokens by row that are
    scheduled so far; owns nothing."""

    def __init__(
        self,
        rows: Rows,
        waiting: WaitingQueue,
        features: StepFeatures,
        counts: Ids,
        max_num_batched_tokens: int,
        most: int,
        *,
        are_whole: bool,
    ) -> None:
        """most: largest number of tokens of a prompt in a step while other requests run or wait; 0: a quarter of all.
        are_whole: each prompt is computed in one step."""
        self._rows, self._waiting, self._features, self._counts = rows, waiting, features, counts
        self._budget = max_num_batched_tokens
        self._most = max_num_batched_tokens if are_whole else most or max_num_batched_tokens // 4
        self._are_whole = are_whole

    def defers(self, request: Request, budget: int) -> bool:
        """Return whether a request has to wait for a step with more than `budget` tokens left."""
        return self._are_whole and request.num_tokens > budget

    def of(self, request: Request, ahead: int, budget: int) -> int:
        """Return how many of the next `ahead` tokens of a running request this step computes, if `budget` tokens are
        left for prompts. Features may lower the number, even to 0, or raise it while the step has room."""
        count = min(ahead, budget, self._limit(request))
        for cut in self._features.cut:
            count = cut(request, count, self._budget - int(self._counts.sum()))
        return count

    def _limit(self, request: Request) -> int:
        """Return the largest number of tokens of a request in this step. A lone request gets the whole budget, and so
        does a resumed one (it has output tokens), unless the step samples: then it gets what the step's other chunks
        have left of a prompt's limit, and at least 1."""
        is_alone = self._rows.num_active <= 1 and len(self._waiting) == 0
        if is_alone or (request.num_output_tokens and not self._brings_tokens()):
            return self._budget
        given = int(self._counts[self._counts > 1].sum()) if request.num_output_tokens else 0
        return max(self._most - given, 1)

    def _brings_tokens(self) -> bool:
        """Return whether the step so far computes a row to the end of its known tokens, and so samples a token for
        it."""
        ends = self._rows.num_scheduled + self._counts
        return bool(((self._counts > 0) & (ends >= self._rows.num_tokens)).any())
