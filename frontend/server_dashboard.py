"""/dashboard: one page that is served from a file and asks for its numbers once a second.

The page has no external asset; a policy forbids it to load any. The numbers are the metrics' own, totals and cumulative
buckets, of which the page makes rates and quantiles over the time that it looks at.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ..ipc.engine_spec import EngineSpec
from ..ipc.version import tokenloom_version
from .metrics_engine import SECONDS
from .openai_errors import HttpError, json_response
from .server_endpoint import Endpoint, read_body
from .server_engine import LocalEngine
from .service import Frontend
from .tokenizer import JsonObject

PAGE = Path(__file__).resolve().parent / "dashboard" / "index.html"
MAX_SHOWN = 100  # open answers in the table

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class AbortAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which row of the table."""

    key: int


class Dashboard:
    """The page, its data and its one button."""

    def __init__(self, engine: LocalEngine, frontend: Frontend, spec: EngineSpec) -> None:
        self._engine = engine
        self._frontend = frontend
        self._spec = spec
        self._begun_at = time.monotonic()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/", self.home),
            Endpoint("/dashboard", self.page, "A page with live numbers", media_type="text/html"),
            Endpoint("/dashboard/data", self.data),
            Endpoint("/dashboard/abort", self.abort, body_type=AbortAnswer),
        ]

    @cached_property
    def _html(self) -> bytes:
        return PAGE.read_bytes()

    async def home(self, request: Request) -> Response:
        """For a person who opens the address that the Ready line names."""
        return RedirectResponse("dashboard")

    async def page(self, request: Request) -> Response:
        return Response(self._html, headers=_HEADERS, media_type="text/html; charset=utf-8")

    async def data(self, request: Request) -> Response:
        health = self._frontend.health()
        metrics = self._frontend.metrics
        body: JsonObject = {
            "model": self._spec.served_model_name,
            "version": tokenloom_version(),
            "uptime_s": time.monotonic() - self._begun_at,
            "state": health.state,
            "running": health.num_running,
            "waiting": health.num_waiting,
            "restarts": health.num_restarts,
            "last_failure": health.last_failure,
            "kv_use": metrics.kv_use,
            "kv_blocks": metrics.num_kv_blocks,
            "block_size": self._spec.config.block_size,
            "kv_map": list(metrics.progress.kv_map),
            "phases": self._frontend.start_phases,
            "totals": {
                "generation_tokens": metrics.generation_tokens.sum,
                "prompt_tokens": metrics.prompt_tokens.sum,
                "prefix_cache_queries": metrics.cache_queries.sum,
                "prefix_cache_hits": metrics.cache_hits.sum,
                "preemptions": metrics.preemptions.sum,
            },
            "ended": {labels[0][1]: count for _, labels, count in metrics.finished.samples()},
            "bounds": SECONDS,
            "histograms": {
                "ttft": metrics.first_token.cumulative,
                "itl": metrics.inter_token.cumulative,
                "queue": metrics.queue.cumulative,
                "e2e": metrics.end_to_end.cumulative,
            },
            "num_open": metrics.num_open,
            "open": metrics.open_answers(MAX_SHOWN),
        }
        return json_response(body, headers={"cache-control": "no-store"})

    async def abort(self, request: Request) -> Response:
        body = await read_body(request, AbortAnswer)
        if not self._frontend.abort_answer(body.key):
            raise HttpError(404, f"no answer {body.key} is open", param="key")
        self._engine.wake()
        return json_response({"key": body.key, "aborted": 1})
