"""CohereEmbeddings: the response of /v1/embed and /v2/embed, embeddings in Cohere's form and types."""

from __future__ import annotations

from .....ipc.codec import num_ids
from .....ipc.errors import RequestError
from .....ipc.messages.intake import BodyInput
from .....ipc.spec.config.engine_spec import EngineSpec
from ....forms.openai.embedding_body import CohereEmbedRequest
from ....forms.openai.errors import encode_json
from ....forms.openai.params import errors_about, refuse_unserved
from ....forms.openai.vectors import COHERE_TYPES
from ...bodies.body_parser import ParsedBody
from .embeddings import Embeddings
from .local_engine import LocalEngine
from .run import Run
from .slices import in_slices


class CohereEmbeddings(Embeddings):
    """Response to one request for embeddings in Cohere's form."""

    def __init__(
        self, engine: LocalEngine, parsed: ParsedBody[CohereEmbedRequest], model: str, spec: EngineSpec, version: int
    ) -> None:
        self._request, self._version = parsed.body, version
        self._texts = [each.text or "" for each in parsed.inputs]
        refuse_unserved(self._request)
        prefix = self._request.prefix(spec.model.pooling.prompts)
        inputs = [BodyInput(text=prefix + text) for text in self._texts]
        with errors_about("output_dimension", "dimensions"):
            super().__init__(engine, ParsedBody(self._request.embedding, inputs), model)
        self.prompt_field = "texts"

    async def whole(self) -> bytes:
        kinds = self._request.embedding_types
        is_bare = self._version == 1 and kinds is None
        with errors_about("output_dimension", "dimensions"), self.run() as run:
            vectors = await self._vectors(run)
            self._check_lengths(run)
            encoded = {kind: await in_slices(map(COHERE_TYPES[kind], vectors)) for kind in kinds or ["float"]}
            units = {"input_tokens": run.num_prompt_tokens, "image_tokens": 0}
            tokens = {"input_tokens": run.num_prompt_tokens, "output_tokens": 0}
            meta = {"api_version": {"version": str(self._version)}, "billed_units": units, "tokens": tokens}
            kind, shown = ("embeddings_floats", encoded["float"]) if is_bare else ("embeddings_by_type", encoded)
            body = {"id": self.id, "texts": self._texts, "embeddings": shown, "meta": meta, "response_type": kind}
            return encode_json(body)

    def _check_lengths(self, run: Run) -> None:
        """Raise RequestError if a prompt, truncated if the request asks for it, has more than max_tokens."""
        most = self._request.max_tokens
        for index in range(run.num_choices):
            num_tokens = num_ids(run.prompt_ids(index))
            if most and num_tokens > most:
                raise RequestError(f"texts[{index}] has {num_tokens} tokens, max_tokens is {most}: set truncate END")
