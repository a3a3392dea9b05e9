"""EmbeddingRequestOutput: what `embed` gives back. Names and meanings are vLLM's."""

from __future__ import annotations

from array import array

import msgspec

from ..ipc.errors import ProtocolError, RequestError
from ..ipc.messages import BulkArray
from .outputs import RequestOutput


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The vector of one prompt."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={len(self.embedding)})"


class EmbeddingRequestOutput(msgspec.Struct, kw_only=True):
    """A prompt and its vector."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


def to_embedding(output: RequestOutput) -> EmbeddingRequestOutput:
    """The output of a request with pooling, which has ended. RequestError if it ended early: by abort or timeout."""
    if output.embedding is None:
        reason = output.outputs[0].finish_reason
        raise RequestError(f"request {output.request_id} ended with {reason} before its prompt was embedded")
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        outputs=EmbeddingOutput(embedding=floats(output.embedding).tolist()),
        num_cached_tokens=output.num_cached_tokens,
    )


def floats(vector: BulkArray) -> array[float]:
    """The numbers of a vector; ProtocolError if there are not as many as it says."""
    numbers = array("f")
    numbers.frombytes(vector.data)
    if vector.shape != [len(numbers)]:
        raise ProtocolError(f"a vector of shape {vector.shape} has {len(numbers)} numbers")
    return numbers
