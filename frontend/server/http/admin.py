"""AdminEndpoints: health, readiness, load, models, tokenize, detokenize, abort, metrics, version.

HTML pages are in `web/pages.py`.
"""

from __future__ import annotations

import time

import prometheus_client  # noqa: F401 - before the server listens: a scrape must not need a free descriptor
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.codec import JsonObject, decode_ids, num_ids
from ....ipc.messages.adapter import AdapterInfo
from ....ipc.params.sampling_defaults import chat_sampling
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.version import tokenloom_version
from ...forms.anthropic.errors import VERSION_HEADER
from ...forms.anthropic.models import model_info, model_page
from ...forms.openai.errors import HttpError, encode_json, json_response, unknown_model
from ...forms.openai.schema import AbortRequest, DetokenizeRequest, TokenizeRequest
from ..api.continuation import current
from ..api.openai.local_engine import LocalEngine
from ..api.openai.slices import in_slices
from ..requests.frontend import Frontend
from .endpoint import AnyBody, Endpoint
from .peers import Peers

PIECE_BYTES = 1 << 16  # size of token ids that are encoded without yielding to the event loop


class AdminEndpoints:
    """Handlers that answer without waiting for the core."""

    def __init__(self, engine: LocalEngine, frontend: Frontend, spec: EngineSpec, peers: Peers) -> None:
        self._engine = engine
        self._peers = peers
        self._frontend = frontend
        self._spec = spec
        self._begun = int(time.time())

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/tokenize", self.tokenize, "The tokens of a text or a chat", TokenizeRequest),
            Endpoint("/detokenize", self.detokenize, "The text of tokens", DetokenizeRequest),
            Endpoint("/abort", self.abort, "End a request by the id of its answer, of any endpoint", AbortRequest),
            Endpoint("/v1/models", self.models, "The served model"),
            Endpoint("/v1/models/{model:path}", self.model),
            Endpoint("/health", self.health, "503 if requests are open and no step finishes"),
            Endpoint("/ready", self.ready, "503 while new requests would be refused"),
            Endpoint("/version", self.version, "The version"),
            Endpoint("/metrics", self.metrics, "For Prometheus", media_type="text/plain"),
            Endpoint("/ping", self.health, "As /health, for SageMaker"),
            Endpoint("/ping", self.health, "The same", AnyBody),
            Endpoint("/load", self.load, "The number of open requests"),
            Endpoint("/usage", self.usage, "The use of API keys with names"),
        ]

    async def models(self, request: Request) -> Response:
        cards = [self._model(name) for name in self._spec.model_names]
        key = current().api_key
        infos = self._frontend.adapters.infos
        cards += [self._adapter(info) for info in infos if key is None or key.may_use(info.name)]
        is_anthropics = VERSION_HEADER.decode() in request.headers
        return json_response(model_page(cards) if is_anthropics else {"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        card = self._card(request.path_params["model"])
        return json_response(model_info(card) if VERSION_HEADER.decode() in request.headers else card)

    def _card(self, name: str) -> JsonObject:
        """Return the description of a model or an adapter; HttpError 404 if the name is unknown."""
        if name in self._spec.model_names or (self._spec.takes_any_name and self._adapter_of(name) is None):
            return self._model(name)
        if (info := self._adapter_of(name)) is None:
            raise unknown_model(self._frontend.adapters.unknown(name))
        return self._adapter(info)

    def _adapter_of(self, name: str) -> AdapterInfo | None:
        return next((info for info in self._frontend.adapters.infos if info.name == name), None)

    def _adapter(self, info: AdapterInfo) -> JsonObject:
        card = {"id": info.name, "created": int(info.loaded_at), "root": info.path, "parent": info.base}
        return self._model(info.name) | card

    def _model(self, name: str) -> JsonObject:
        return {
            "id": name,
            "object": "model",
            "created": self._begun,
            "owned_by": "tokenloom",
            "root": self._spec.config.model or "demo",
            "parent": None,
            "max_model_len": self._engine.inputs.max_model_len,
            "default_sampling_params": self._spec.default_sampling_params,
            "chat_sampling_params": chat_sampling(self._spec.default_sampling_params),
            "input_modalities": ["text", *([kind] if (kind := self._engine.inputs.media_limits.kind) else [])],
        }

    async def tokenize(self, request: Request) -> Response:
        parsed = await self._engine.bodies.read(request, TokenizeRequest)
        await self._engine.model_of(parsed.body)
        if parsed.body.messages is not None or parsed.inputs[0].is_of_chat:
            token_ids = await self._engine.chat_tokens(parsed)
        else:
            token_ids = await self._engine.text_tokens(parsed.inputs[0], parsed.body.add_special_tokens is not False)
        start = b'{"count":%d,"max_model_len":%d,"tokens":[' % (num_ids(token_ids), self._engine.inputs.max_model_len)
        pieces = (token_ids[begin : begin + PIECE_BYTES] for begin in range(0, len(token_ids), PIECE_BYTES))
        tokens = await in_slices(encode_json(decode_ids(piece).tolist())[1:-1] for piece in pieces)
        token_strs = None
        if parsed.body.return_token_strs:
            token_strs = await in_slices(map(self._engine.inputs.token_string, decode_ids(token_ids)))
        names = b'],"token_strs":' + encode_json(token_strs)
        return Response(b"".join([start, b",".join(tokens), names, b"}"]), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        parsed = await self._engine.bodies.read(request, DetokenizeRequest)
        await self._engine.model_of(parsed.body)
        text = await self._engine.text_of(parsed.inputs[0].token_ids or b"") if parsed.inputs else ""
        return json_response({"prompt": text})

    async def abort(self, request: Request) -> Response:
        body = (await self._engine.bodies.read(request, AbortRequest)).body
        num_aborted = self._engine.abort(body.request_id)
        if not num_aborted and (answer := await self._peers.ask_all(request, encode_json(body))) is not None:
            return answer
        if not num_aborted:
            raise HttpError(404, f"no request {body.request_id!r:.200} is open", param="request_id")
        return json_response({"request_id": body.request_id, "aborted": num_aborted})

    async def health(self, request: Request) -> Response:
        """Return the engine's state; 503 if requests are open and no step finishes."""
        health = self._frontend.health()
        body: JsonObject = {
            "status": "ok" if health.state == "ready" else health.state,
            "step": health.step,
            "step_age_s": round(health.step_age_s, 3),
            "running": health.num_running,
            "waiting": health.num_waiting,
            "restarts": health.num_restarts,
            "last_failure": health.last_failure,
            "kernels": self._frontend.metrics.kernels,
        }
        return json_response(body, 503 if health.is_stalled else 200)

    async def ready(self, request: Request) -> Response:
        """Return 200 if a new request would be accepted, else 503. A pause or sleep counts as ready: requests then
        wait."""
        health = self._frontend.health()
        return json_response({"ready": health.is_ready}, 200 if health.is_ready else 503)

    async def load(self, request: Request) -> Response:
        """Return the number of open requests, for load balancers, under vLLM's name."""
        num_open = self._frontend.num_open_requests
        num_open += sum(each.num_open_requests for each in self._frontend.shared.others)
        return json_response({"server_load": num_open})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format. It needs no key, as scrapers expect."""
        if (state := self._frontend.metrics.state) is not None:
            await state.refresh()
        if (keys := self._frontend.key_metrics) is not None:
            keys.refresh()
        return Response(self._frontend.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def usage(self, request: Request) -> Response:
        """Return the use and the limits of the caller's key, or of all keys if the caller's has no name."""
        own, found = current().api_key, self._frontend.key_metrics
        usages = {} if found is None else found.usages()
        keys = [key for key in self._frontend.keys.named if own is None or own.name in ("", key.name)]
        limits = ("weight", "kv_share", "tokens_per_minute", "open_requests", "adapters")
        data = [
            {"name": key.name, **usages[key.name]._asdict(), "limits": {name: getattr(key, name) for name in limits}}
            for key in keys
            if key.name in usages
        ]
        return json_response({"object": "list", "data": data})

    async def version(self, request: Request) -> Response:
        return json_response({"version": tokenloom_version()})
