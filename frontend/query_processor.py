"""QueryProcessor: answers what a client asks beside generating: tokenize, detokenize, health, info.

Long texts go through the threads; health comes from the last Progress of the supervisor, so that it is answered even
when the core is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..ipc.codec import num_ids
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import RequestError, TokenloomError, error_info
from ..ipc.messages import (
    Detokenize,
    GetHealth,
    GetInfo,
    Health,
    Info,
    Initialize,
    Progress,
    QueryFailed,
    Text,
    TokenIds,
    Tokenize,
)
from ..ipc.version import tokenloom_version
from .background import Background
from .input_processor import HEAVY_CHARACTERS, InputProcessor, is_heavy

STALL_S = 10.0  # with requests there and no step for longer, the engine is called stalled

Query: TypeAlias = Tokenize | Detokenize | GetHealth | GetInfo
Reply: TypeAlias = TokenIds | Text | Health | Info | QueryFailed


class QueryProcessor:
    """Owns what the supervisor told last, and when anything last moved in the core."""

    def __init__(self, spec: EngineSpec, inputs: InputProcessor, background: Background) -> None:
        self._spec = spec
        self._inputs = inputs
        self._background = background
        self._num_kv_blocks = spec.config.num_kv_blocks or 0
        self._progress = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0)
        self._progress_at = 0.0
        self._moved_at = 0.0
        self.is_draining = False  # new requests are refused

    def on_initialize(self, message: Initialize) -> None:
        self._num_kv_blocks = message.num_blocks - 1  # one block is the null block

    def on_progress(self, progress: Progress, now: float) -> None:
        """`now` in monotonic seconds, as everywhere here."""
        if progress.step != self._progress.step or not (_is_busy(self._progress) and _is_busy(progress)):
            self._moved_at = now
        self._progress, self._progress_at = progress, now

    def answer(self, query: Query, is_ready: bool, now: float, send: Callable[[Reply], None]) -> None:
        """Answer at once, or later where the work is long."""
        if isinstance(query, GetHealth):
            send(self.health(query.query_id, is_ready, now))
        elif isinstance(query, GetInfo):
            send(self._info(query.query_id))
        elif _is_heavy(query):
            self._background.run(lambda: self._convert(query), lambda reply: send(_reply(query, reply)))
        else:
            try:
                send(self._convert(query))
            except RequestError as error:
                send(_reply(query, error))

    def _convert(self, query: Tokenize | Detokenize) -> Reply:
        """May run in any thread."""
        if isinstance(query, Detokenize):
            return Text(query_id=query.query_id, text=self._inputs.detokenize(query.token_ids))
        prompt = self._inputs.tokenize(query.prompt, None, query.chat)
        return TokenIds(query_id=query.query_id, token_ids=prompt.token_ids)

    def health(self, query_id: int, is_ready: bool, now: float) -> Health:
        progress = self._progress
        since = now - self._progress_at if self._progress_at else 0.0
        return Health(
            query_id=query_id,
            is_ready=is_ready and progress.is_core_up and not self.is_draining,
            is_stalled=_is_busy(progress) and now - self._moved_at > STALL_S,
            step=progress.step,
            step_age_s=progress.step_age_s + since,
            num_running=progress.num_running,
            num_waiting=progress.num_waiting,
            num_free_blocks=progress.num_free_blocks,
            num_recomputed_tokens=progress.num_recomputed_tokens,
            num_restarts=progress.num_restarts,
            last_failure=progress.last_failure,
            is_paused=progress.is_paused,
            is_draining=self.is_draining,
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
            num_kv_blocks=self._num_kv_blocks,
            tensor_parallel_size=spec.config.tensor_parallel_size,
            eos_token_ids=sorted(self._inputs.eos_token_ids),
            dtype=spec.dtype,
            device=spec.device,
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
