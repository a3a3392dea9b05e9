"""QueryProcessor: answers what a client asks beside generating: tokenize, detokenize, health, info.

Long texts go through the threads; health comes from the last Progress of the supervisor, so that it is answered even
when the core is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ipc.codec import num_ids
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import TokenloomError, error_info
from ..ipc.messages import (
    Detokenize,
    GetHealth,
    GetInfo,
    Health,
    Info,
    Progress,
    QueryFailed,
    Reply,
    Text,
    TokenIds,
    Tokenize,
)
from ..ipc.version import tokenloom_version
from .background import Background
from .core_link import CoreLink
from .input_processor import HEAVY_CHARACTERS, InputProcessor, is_heavy
from .metrics_engine import EngineMetrics

_PASSED_ON = (  # from the last Progress to who asks for health
    *("step", "num_running", "num_waiting", "num_free_blocks", "num_recomputed_tokens"),
    *("num_restarts", "last_failure", "is_paused"),
)
STALL_S = 10.0  # with requests there and no step for longer, the engine is called stalled


@dataclass(eq=False)
class QueryProcessor:
    """Knows when the supervisor told last how the core is, and when anything last moved there."""

    _spec: EngineSpec
    _inputs: InputProcessor
    _background: Background
    _core: CoreLink
    _metrics: EngineMetrics
    _awake_time: Callable[[], float]  # seconds, in which a suspension of the engine is no silence of the core
    _progress_at: float = 0.0
    _moved_at: float = 0.0
    is_draining: bool = False  # new requests are refused

    def on_progress(self, progress: Progress) -> None:
        known, self._progress_at = self._metrics.progress, self._awake_time()
        has_gone_on = progress.step != known.step or progress.is_paused != known.is_paused
        if has_gone_on or not (_is_busy(known) and _is_busy(progress)):
            self._moved_at = self._progress_at
        self._metrics.on_progress(progress)

    def answer(self, query: Tokenize | Detokenize | GetHealth | GetInfo, send: Callable[[Reply], None]) -> None:
        """Answer at once, or later where the work is long."""
        if isinstance(query, GetHealth):
            send(self.health(query.query_id))
        elif isinstance(query, GetInfo):
            send(self._info(query.query_id))
        else:
            self._background.run(
                lambda: self._convert(query), lambda reply: send(_reply(query, reply)), is_long=_is_heavy(query)
            )

    def _convert(self, query: Tokenize | Detokenize) -> Reply:
        """May run in any thread."""
        if isinstance(query, Detokenize):
            return Text(query_id=query.query_id, text=self._inputs.detokenize(query.token_ids))
        prompt = self._inputs.tokenize(query.prompt, None, query.chat)
        return TokenIds(query_id=query.query_id, token_ids=prompt.token_ids)

    def health(self, query_id: int = 0) -> Health:
        progress, now = self._metrics.progress, self._awake_time()
        since = now - self._progress_at if self._progress_at else 0.0
        return Health(
            query_id=query_id,
            is_ready=self._core.is_up and progress.is_core_up and not self.is_draining,
            is_stalled=_is_busy(progress) and not progress.is_paused and now - self._moved_at > STALL_S,
            step_age_s=progress.step_age_s + since,
            is_draining=self.is_draining,
            **{name: getattr(progress, name) for name in _PASSED_ON},
        )

    def _info(self, query_id: int) -> Info:
        spec = self._spec
        return Info(
            query_id=query_id,
            version=tokenloom_version(),
            run_id=spec.run_id,
            model=spec.served_model_name,
            max_model_len=spec.max_model_len,
            vocab_size=spec.model.vocab_size,
            block_size=spec.config.block_size,
            num_kv_blocks=self._metrics.num_kv_blocks or spec.config.num_kv_blocks or 0,
            tensor_parallel_size=spec.config.tensor_parallel_size,
            eos_token_ids=sorted(self._inputs.eos_token_ids),
            dtype=spec.dtype,
            device=spec.device,
            kernels=self._metrics.kernels,
        )


def _is_heavy(query: Tokenize | Detokenize) -> bool:
    if isinstance(query, Detokenize):
        return num_ids(query.token_ids) > HEAVY_CHARACTERS
    return is_heavy(query.prompt, query.chat)


def _reply(query: Tokenize | Detokenize, result: Reply | TokenloomError) -> Reply:
    if isinstance(result, TokenloomError):
        return QueryFailed(query_id=query.query_id, error=error_info(result))
    return result


def _is_busy(progress: Progress) -> bool:
    return progress.num_running + progress.num_waiting > 0
