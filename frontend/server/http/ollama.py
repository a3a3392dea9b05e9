"""OllamaEndpoints: Ollama's API over the served model and its adapters.

Programs that know Ollama alone list models, chat, generate and embed here. One engine serves one model, so requests to
create, copy, push or delete a model are refused with a sentence that says what does it, and so are pulls of a model
that is not served (404).
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.codec import JsonObject
from ....ipc.params.sampling_defaults import SAMPLING, chat_sampling
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.ollama.answers import digest_of, time_text
from ...forms.ollama.request_body import (
    LATEST,
    NamedModel,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from ...forms.openai.errors import HttpError, encode_json, json_response
from ...forms.openai.generation import Generation
from ...forms.openai.params import errors_about, prompt_errors_about, schema_errors_about, with_defaults
from ...forms.openai.schema import ChatRequest, CompletionRequest
from ..api.ollama import LineStream, OllamaAnswer
from ..api.openai.chat import ChatCompletion
from ..api.openai.completions import Completion
from ..api.openai.embeddings import Embeddings
from ..api.openai.events import report_tokens, until_disconnect
from ..api.openai.local_engine import LocalEngine
from ..bodies.body_parser import BodyT, ParsedBody
from ..metrics.access_record import CLIENT_CLOSED_REQUEST
from .endpoint import Endpoint

API_VERSION = "0.13.0"  # of Ollama, whose forms these are: clients compare it with what they need
GenerationT = TypeVar("GenerationT", bound=Generation)
ResultT = TypeVar("ResultT")
NewChat = Callable[[ParsedBody[ChatRequest], str], Awaitable[ChatCompletion]]
NewCompletion = Callable[[ParsedBody[CompletionRequest], str], Awaitable[Completion]]
_QUANTIZATION = re.compile(r"(?<![a-z0-9])(i?q\d_\w+|tq\d_\d|mxfp4|bf16|f16|f32)(?![a-z0-9])", re.IGNORECASE)
_OPTIONS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}  # Ollama's names of our parameters
ELSEWHERE = (
    "one engine serves one model: engine-launch pull, ls and rm manage the files, engine-launch serve serves one"
)


class OllamaEndpoints:
    """Handlers of /api/…. `new_chat` and `new_completion` check a request and make its prompt."""

    def __init__(
        self,
        engine: LocalEngine,
        spec: EngineSpec,
        new_chat: NewChat,
        new_completion: NewCompletion,
        refusals: Callable[[], AbstractContextManager[None]],
        *,
        template: str,
    ) -> None:
        """`refusals`: a context that counts a request as refused if it raises an expected error. `template`: the
        model's chat template, empty without one."""
        self._engine = engine
        self._spec = spec
        self._new_chat = new_chat
        self._new_completion = new_completion
        self._refusals = refusals
        self._template = template
        self._started_at = time.time()
        files = _weight_files(Path(spec.model_folder))
        self._size = sum(each.stat().st_size for each in files)
        self._gguf_name = next((each.resolve().name for each in files if each.suffix == ".gguf"), "")

    def endpoints(self) -> list[Endpoint]:
        others = {"pull": self.pull} | dict.fromkeys(("push", "create", "copy"), self.refuse)
        return [
            Endpoint("/api/chat", self.chat, "An answer in a chat (Ollama)", OllamaChatRequest),
            Endpoint("/api/generate", self.generate, "An answer to a prompt (Ollama)", OllamaGenerateRequest),
            Endpoint("/api/embed", self.embed, "Embeddings of texts (Ollama)", OllamaEmbedRequest),
            Endpoint("/api/embeddings", self.embed_one, body_type=OllamaEmbeddingsRequest),
            Endpoint("/api/tags", self.tags, "The models (Ollama)"),
            Endpoint("/api/ps", self.ps, "The models in memory (Ollama)"),
            Endpoint("/api/version", self.version, "The version of Ollama's API that is followed"),
            Endpoint("/api/show", self.show, "A model (Ollama)", NamedModel),
            *(Endpoint(f"/api/{name}", answer, body_type=NamedModel) for name, answer in others.items()),
            Endpoint("/api/delete", self.refuse, body_type=NamedModel, other_method="DELETE"),
        ]

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def chat(self, request: Request) -> Response:
        parsed, model = await self._read(request, OllamaChatRequest)
        body = parsed.body
        if not body.messages and not parsed.inputs:
            return self._loaded(body.model or model, is_chat=True)
        with prompt_errors_about("messages"), schema_errors_about("format"), _option_errors():
            with self._refusals():
                chat = await self._new_chat(ParsedBody(self._filled(body.chat), parsed.inputs), model)
            return await self._answer(request, OllamaAnswer(chat, model, is_chat=True), is_streamed=body.is_streamed)

    async def generate(self, request: Request) -> Response:
        parsed, model = await self._read(request, OllamaGenerateRequest)
        body = parsed.body
        if not body.prompt and not body.images and not parsed.inputs:
            return self._loaded(body.model or model, is_chat=False)
        with prompt_errors_about("prompt"), schema_errors_about("format"), _option_errors():
            source: ChatCompletion | Completion
            with self._refusals():
                if body.raw:
                    source = await self._new_completion(ParsedBody(self._filled(body.completion), parsed.inputs), model)
                else:
                    source = await self._new_chat(ParsedBody(self._filled(body.chat), parsed.inputs), model)
            return await self._answer(request, OllamaAnswer(source, model, is_chat=False), is_streamed=body.is_streamed)

    async def _answer(self, request: Request, answer: OllamaAnswer, *, is_streamed: bool) -> Response:
        if is_streamed:
            return LineStream(answer.lines(), answer.end, bytes)
        report_tokens(request.scope)
        return await _unless_gone(request, answer.whole(), partial(Response, media_type="application/json"))

    def _filled(self, body: GenerationT) -> GenerationT:
        """Fill the fields that are null with the model's sampling defaults; if it has none, with FIRST_IMPRESSION."""
        filled = with_defaults(body, self._spec)
        chat = chat_sampling(self._spec.default_sampling_params)
        given = {name: value for name, value in chat.items() if name in SAMPLING and getattr(filled, name) is None}
        return msgspec.structs.replace(filled, **given)

    async def embed(self, request: Request) -> Response:
        parsed, model = await self._read(request, OllamaEmbedRequest)
        begun = time.time()

        def write(found: tuple[list[list[float]], int]) -> Response:
            vectors, num_tokens = found
            duration = round((time.time() - begun) * 1e9)
            counts = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": num_tokens}
            return json_response({"model": model, "embeddings": vectors, **counts})

        if not parsed.inputs:
            return write(([], 0))
        with self._refusals(), prompt_errors_about("input"):
            embeddings = Embeddings(self._engine, ParsedBody(parsed.body.embedding, parsed.inputs), model)
        return await _unless_gone(request, embeddings.vectors(), write)

    async def embed_one(self, request: Request) -> Response:
        parsed, model = await self._read(request, OllamaEmbeddingsRequest)
        with self._refusals(), prompt_errors_about("prompt"):
            embeddings = Embeddings(self._engine, ParsedBody(parsed.body.embedding, parsed.inputs), model)
        return await _unless_gone(
            request, embeddings.vectors(), lambda found: json_response({"embedding": found[0][0]})
        )

    async def _read(self, request: Request, body_type: type[BodyT]) -> tuple[ParsedBody[BodyT], str]:
        """Read a body of any content type, since curl's is that of forms; return it and the name for answers of the
        model that it names. HttpError 404 for a model that is not served."""
        with self._refusals():
            parsed = await self._engine.bodies.read(request, body_type, takes_any_type=True)
            return parsed, await self._model_of(parsed.body)

    async def _model_of(self, body: object) -> str:
        name = getattr(body, "model", None) or getattr(body, "name", None) or ""
        return await self._engine.model_of(NamedModel(model=self._plain(name)))

    def _plain(self, name: str) -> str:
        """Return a model's name without the tag that clients add."""
        return name if name in self._spec.model_names else name.removesuffix(LATEST)

    def _loaded(self, model: str, *, is_chat: bool) -> Response:
        """Answer a request without a prompt, by which clients load a model."""
        shown: JsonObject = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        head = {"model": model, "created_at": time_text(time.time())}
        return json_response({**head, **shown, "done": True, "done_reason": "load"})

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def tags(self, request: Request) -> Response:
        return json_response({"models": [self._model(name) for name in self._names()]})

    async def ps(self, request: Request) -> Response:
        length = self._engine.inputs.max_model_len
        never = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0, "context_length": length}
        return json_response({"models": [self._model(name) | never for name in self._names()]})

    async def version(self, request: Request) -> Response:
        return json_response({"version": API_VERSION})

    async def show(self, request: Request) -> Response:
        _, name = await self._read(request, NamedModel)
        model = self._spec.model
        family = model.architecture
        shown = {"num_ctx": self._engine.inputs.max_model_len, **self._spec.default_sampling_params}
        info: JsonObject = {
            "general.architecture": family,
            f"{family}.context_length": self._engine.inputs.max_model_len,
            f"{family}.embedding_length": model.hidden_size,
            f"{family}.block_count": model.num_layers,
            f"{family}.vocab_size": model.vocab_size,
        }
        return json_response(
            {
                "modelfile": f"FROM {name}\n",
                "parameters": "\n".join(f"{_OPTIONS.get(key, key)} {value}" for key, value in shown.items()),
                "template": self._template,
                "details": self._details(),
                "model_info": info,
                "capabilities": self._capabilities(),
                "modified_at": time_text(self._started_at),
            }
        )

    async def pull(self, request: Request) -> Response:
        """Report success for a model that is served: clients pull before they ask. Others are refused."""
        parsed, _ = await self._read(request, NamedModel)
        done = encode_json({"status": "success"}) + b"\n"
        return Response(done, media_type="application/json" if parsed.body.stream is False else "application/x-ndjson")

    async def refuse(self, request: Request) -> Response:
        await self._engine.bodies.read(request, NamedModel, takes_any_type=True)
        raise HttpError(501, f"{request.url.path} is not served: {ELSEWHERE}")

    def _names(self) -> Sequence[str]:
        return [*self._spec.model_names, *self._engine.adapter_names]

    def _model(self, name: str) -> JsonObject:
        return {
            "name": name,
            "model": name,
            "modified_at": time_text(self._started_at),
            "size": self._size,
            "digest": digest_of(f"{self._spec.model_folder} {name}"),
            "details": self._details(),
        }

    def _details(self) -> JsonObject:
        family = self._spec.model.architecture
        found = _QUANTIZATION.search(self._gguf_name)
        return {
            "parent_model": "",
            "format": "gguf" if self._gguf_name else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": found[1].upper() if found else self._spec.dtype.upper(),
        }

    def _capabilities(self) -> list[str]:
        kind = self._engine.inputs.media_limits.kind
        found = {
            "completion": True,
            "tools": bool(self._template),
            "thinking": self._engine.inputs.answer_form.has_thoughts,
            "vision": kind == "image",
            "audio": kind == "audio",
        }
        return [name for name, is_there in found.items() if is_there]


def _option_errors() -> AbstractContextManager[None]:
    """Name Ollama's options in errors."""
    return errors_about("options.repeat_penalty", r"repetition_penalty\b")


async def _unless_gone(
    request: Request, work: Coroutine[object, object, ResultT], write: Callable[[ResultT], Response]
) -> Response:
    """Answer with the result of `work`, or end it if the client disconnects."""
    result = await until_disconnect(request.receive, work)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if result is None else write(result)


def _weight_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
