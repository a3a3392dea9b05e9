"""PooledResults: base class of the responses to requests that pool, from their prompts to their results."""

from __future__ import annotations

from .....ipc.codec import JsonObject
from .....ipc.messages.base import BulkArray
from ....forms.openai.prompts import answer_id
from ..continuation import current
from ..openai.choices import EngineResponse
from ..openai.embeddings import MAX_OPEN, results_of
from ..openai.run import Run


class PooledResults(EngineResponse):
    """Response that needs the results of all prompts."""

    max_open = MAX_OPEN

    async def results(self, run: Run) -> list[BulkArray]:
        """Return the result of each prompt."""
        return await results_of(run, self.prompt_field, "pooled", lambda delta: delta.embedding)

    def usage(self, run: Run) -> JsonObject:
        """Return the tokens of all prompts, under vLLM's names."""
        return {"prompt_tokens": run.num_prompt_tokens, "total_tokens": run.num_prompt_tokens, "completion_tokens": 0}


def new_id(prefix: str, given: str | None) -> str:
    """Return the id of a response."""
    return answer_id(prefix, given, current().digits("id"))
