"""PageEndpoints: the HTML pages (dashboard, chat, docs) and the dashboard's data.

The dashboard is one file, the chat and the docs have folders of scripts and styles; nothing comes from other servers.
Pages hold no data and need no key, but the requests that they send do. The dashboard's data are totals and cumulative
buckets of the metrics; the page computes rates and quantiles from them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from .....ipc.codec import JsonObject
from .....ipc.spec.config.engine_spec import EngineSpec
from .....ipc.version import tokenloom_version
from ....forms.openai.errors import HttpError, encode_json, json_response
from ...api.openai.local_engine import LocalEngine
from ...api.operator_only import check_operator
from ...metrics.registry import Counter
from ...metrics.shared_counts import MAX_SHOWN
from ...requests.engine_metrics import SECONDS
from ...requests.frontend import Frontend
from ..endpoint import Endpoint
from ..peers import Peers
from .files import ASSETS, FOLDER

_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_NO_OTHERS = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src 'self'; "
    + _NO_OTHERS
)
_STRICT_POLICY = (  # of pages that show what models write: no script but theirs may run; media are those attached
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"media-src data:; {_NO_OTHERS}"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class AbortAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Key of the open answer to abort, from the dashboard's data."""

    key: str


class PageEndpoints:
    """Handlers of the pages. Each file is read once, at the start; the dashboard's data are collected for each poll."""

    def __init__(self, engine: LocalEngine, frontend: Frontend, spec: EngineSpec, peers: Peers) -> None:
        self._engine, self._frontend, self._spec, self._peers = engine, frontend, spec, peers
        self._begun_at = time.monotonic()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/", self._redirect("dashboard")),
            Endpoint("/dashboard", _page("dashboard.html"), "The dashboard page", media_type="text/html"),
            Endpoint("/dashboard/data", self.data),
            Endpoint("/dashboard/abort", self.abort_answer, body_type=AbortAnswer),
            Endpoint("/chat", _page("chat.html", policy=_STRICT_POLICY), "The chat page", media_type="text/html"),
            Endpoint("/docs", _page("docs.html", policy=_STRICT_POLICY), "The page of the API", media_type="text/html"),
            *(Endpoint(f"/{name}", _page(name, _TYPES[Path(name).suffix])) for name in ASSETS),
            Endpoint("/redoc", self._redirect("docs")),
            Endpoint("/favicon.ico", _page("favicon.ico", "image/x-icon")),
        ]

    def _redirect(self, page: str) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that redirects to `page` under the proxy's root path, or, if none is set, by a relative
        link."""
        root = self._spec.config.root_path  # without one the link is relative, for proxies with an unknown prefix

        async def redirect(request: Request) -> Response:
            return RedirectResponse(f"{root}/{page}" if root else page)

        return redirect

    async def data(self, request: Request) -> Response:
        """Return the dashboard's data, which are of all callers; with `?history`, also the samples of the last two
        minutes."""
        check_operator()
        health = self._frontend.health()
        metrics, others = self._frontend.metrics, self._frontend.shared.others
        joined = metrics.registry.joined
        if metrics.state is not None:
            await metrics.state.refresh()
        body: JsonObject = {
            "model": self._spec.served_model_name,
            "version": tokenloom_version(),
            "uptime_s": time.monotonic() - self._begun_at,
            "state": health.state,
            "running": health.num_running,
            "waiting": health.num_waiting,
            "restarts": health.num_restarts,
            "last_failure": health.last_failure,
            "requests_cut": metrics.core.answers_cut.sum,
            "kv_use": metrics.kv_use,
            "kv_blocks": metrics.num_kv_blocks,
            "block_size": self._spec.config.block_size,
            "kv_map": list(metrics.progress.kv_map),
            "kv_groups": metrics.core.groups.summary(),
            "tiers": None if metrics.tiers is None else metrics.tiers.summary(),
            "adapters": None if metrics.adapters is None else metrics.adapters.summary(),
            "speculation": None if metrics.speculation is None else metrics.speculation.summary(),
            "state_folder": None if metrics.state is None else metrics.state.summary(),
            "phases": self._frontend.start_phases,
            "missed_tokens": _by_label(metrics.core.cache_misses) | _by_label(joined(metrics.answers.changed)),
            "totals": {
                "generation_tokens": joined(metrics.generation_tokens).sum,
                "prompt_tokens": joined(metrics.prompt_tokens).sum,
                "prefix_cache_queries": metrics.core.cache_queries.sum,
                "prefix_cache_hits": metrics.core.cache_hits.sum,
                "preemptions": metrics.core.preemptions.sum,
            },
            "ended": {reason: count for (reason,), count in joined(metrics.finished).totals.items()},
            "bounds": SECONDS,
            "histograms": metrics.latencies(),
            "num_open": metrics.num_open + sum(len(each.open_answers) for each in others),
            "open": [*metrics.open_answers(MAX_SHOWN), *(one for each in others for one in each.open_answers)][
                :MAX_SHOWN
            ],
        }
        if "history" in request.query_params:
            body["history"] = [{"uptime_s": at - self._begun_at, **sample} for at, sample in metrics.history]
        return json_response(body, headers={"cache-control": "no-store"})

    async def abort_answer(self, request: Request) -> Response:
        check_operator()
        body = (await self._engine.bodies.read(request, AbortAnswer)).body
        if not self._frontend.abort_answer(body.key):
            if (answer := await self._peers.ask_all(request, encode_json(body))) is not None:
                return answer
            raise HttpError(404, f"no answer {body.key!r:.100} is open", param="key")
        self._engine.wake()
        return json_response({"key": body.key, "aborted": 1})


def _by_label(counter: Counter) -> JsonObject:
    """Return the counts that are not 0, by their only label."""
    return {label: count for (label,), count in counter.totals.items() if count}


def _page(
    name: str, media_type: str = "text/html; charset=utf-8", policy: str = _POLICY
) -> Callable[[Request], Awaitable[Response]]:
    """Read a file of FOLDER now, and return a handler that answers with its content."""
    content = (FOLDER / name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, headers=_HEADERS | {"content-security-policy": policy}, media_type=media_type)

    return page
