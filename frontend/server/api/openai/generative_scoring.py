"""GenerativeScoring: the response of /generative_scoring, which has one score for each item.

The score is the probability that the first label token follows the query and the item (in the order that the request
sets), by default normalized over the label tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from .....ipc.codec import num_ids
from .....ipc.errors import RequestError
from .....ipc.messages.client import Logprobs
from .....ipc.messages.intake import BodyInput
from ....forms.logprobs import unpack_rows
from ....forms.openai.embedding_body import GenerativeScoringRequest
from ....forms.openai.errors import encode_json
from ....forms.openai.logprobs import LOWEST
from ....forms.openai.params import errors_about, given_params, prompt_errors_about
from ....forms.openai.prompts import answer_id, prompt_submits
from ...bodies.body_parser import ParsedBody
from ..continuation import current
from .choices import EngineResponse
from .embeddings import results_of
from .local_engine import LocalEngine
from .slices import in_slices


class GenerativeScoring(EngineResponse):
    """Response to one request for scores. Created by `start`."""

    prompt_field = "items"

    def __init__(
        self, engine: LocalEngine, body: GenerativeScoringRequest, prompts: Sequence[BodyInput], model: str
    ) -> None:
        self._body, request_id = body, answer_id("generative-scoring", body.request_id, current().digits("id"))
        if not (labels := body.label_token_ids):
            raise RequestError("label_token_ids is empty: give at least one token id")
        with errors_about("label_token_ids", "logprob_token_ids"):
            params = given_params(body, max_tokens=1, ignore_eos=True, detokenize=False, logprob_token_ids=labels)
        super().__init__(engine, model, request_id, prompt_submits(request_id, prompts, params, None))

    @classmethod
    async def start(
        cls, engine: LocalEngine, parsed: ParsedBody[GenerativeScoringRequest], model: str
    ) -> GenerativeScoring:
        """Check all fields, tokenize query and items, and return the response; `whole` starts the scoring."""
        body, limits = parsed.body, engine.inputs.limits
        cut_side = limits.cut_side(body.truncate_prompt_tokens, body.truncation_side)
        with prompt_errors_about("query"):
            query = await engine.text_tokens(parsed.inputs[0], body.add_special_tokens is not False, cut_side)
        items = []
        for item in parsed.inputs[1:]:
            items.append(await engine.text_tokens(item, False, cut_side))
            await asyncio.sleep(0)  # short texts are tokenized in this event loop
        limits.check_share(len(items), 1, num_ids(query) * len(items) + sum(map(num_ids, items)))
        pairs = ((item, query) if body.item_first else (query, item) for item in items)
        return cls(engine, body, [BodyInput(token_ids=first + second) for first, second in pairs], model)

    async def whole(self) -> bytes:
        with errors_about("label_token_ids", "logprob_token_ids"), self.run() as run:
            found = await results_of(run, "items", "scored", lambda delta: delta.logprobs)
            data = await in_slices(
                {"index": index, "object": "score", "score": self._score(each)} for index, each in enumerate(found)
            )
            return encode_json(self._head("list") | {"data": data, "usage": run.usage()})

    def _score(self, logprobs: Logprobs) -> float:
        named = {token_id: max(value, LOWEST) for token_id, value in unpack_rows(logprobs)[0][1:]}
        first = named[self._body.label_token_ids[0]]
        if self._body.apply_softmax is False:
            return math.exp(first)
        highest = max(named.values())
        return math.exp(first - highest) / sum(math.exp(value - highest) for value in named.values())
