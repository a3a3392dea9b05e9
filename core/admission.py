"""Admission: accepts requests that can ever fit, and new ones only while the queue has room."""

from __future__ import annotations

import numpy as np

from ..ipc.codec import num_ids
from ..ipc.config.engine_spec import EngineSpec
from ..ipc.errors import Overloaded, RequestError
from ..ipc.messages.base import FinishReason
from ..ipc.messages.core import EngineCoreRequest
from .kv.manager import KVCacheManager
from .request import Request
from .scheduling.policy import sort_key_of
from .scheduling.waiting_queue import WaitingQueue
from .stats import CoreStats


class Admission:
    """Owns nothing: the limits are the configuration's; the queue, the pool and the rates are the core's."""

    def __init__(self, spec: EngineSpec, kv_cache: KVCacheManager, waiting: WaitingQueue, stats: CoreStats) -> None:
        self._config, self._max_model_len = spec.config, spec.max_model_len
        self._max_tokens = spec.max_request_tokens
        self._kv_cache, self._waiting, self._stats = kv_cache, waiting, stats

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RequestError if the request can never fit, Overloaded if it may fit later. A resubmission (it has
        tokens) is never refused for load."""
        num_prompt = num_ids(message.prompt_token_ids)
        self._check_size(num_prompt, message.max_tokens, is_pooled=message.pooling is not None)
        if any(child.output_token_ids for child in message.children):
            return
        waiting, config, num_answers = self._waiting, self._config, len(message.children)
        self._check_share(num_prompt, num_answers)
        has_too_many = len(waiting) + num_answers > config.max_waiting_requests
        if has_too_many or waiting.num_tokens + num_prompt * num_answers > config.max_waiting_tokens:
            self._stats.num_refused_for_requests += has_too_many
            self._stats.num_refused_for_tokens += not has_too_many
            raise Overloaded(
                f"{len(waiting)} requests with {waiting.num_tokens} tokens wait, at most {config.max_waiting_requests} "
                f"and {config.max_waiting_tokens} may: ask again later",
                retry_after_s=self._stats.seconds_to_drain(waiting.num_tokens),
            )

    def _check_share(self, num_prompt: int, num_answers: int) -> None:
        """Raise RequestError if one request would take too much of the queue."""
        if num_answers > self._config.max_request_answers or num_prompt * num_answers > self._max_tokens:
            raise RequestError(
                f"n is {num_answers} and the prompt has {num_prompt} tokens; one request may have at most "
                f"{self._config.max_request_answers} answers and, counted for each answer, {self._max_tokens} prompt "
                "tokens: send several requests, or raise --max-waiting-requests and --max-waiting-tokens"
            )

    def _check_size(self, num_prompt: int, max_tokens: int, *, is_pooled: bool) -> None:
        """Raise RequestError unless the tokens fit. A prompt to embed has no output tokens."""
        num_needed = self._kv_cache.num_blocks_for(num_prompt + max_tokens - 1)
        if num_prompt < 1 or num_prompt + max_tokens - is_pooled > self._max_model_len:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} do not fit max_model_len "
                f"{self._max_model_len}: shorten the prompt or lower max_tokens"
            )
        if num_needed > self._kv_cache.num_usable_blocks:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {num_needed} KV blocks of "
                f"{self._config.block_size}, the pool has {self._kv_cache.num_usable_blocks}: shorten the request or "
                "raise --num-kv-blocks"
            )

    def request_of(self, frontend_id: int, message: EngineCoreRequest, index: int, root: bytes | None) -> Request:
        """Return the Request of one answer of a checked message; `root` is its `cache_root`."""
        child, params = message.children[index], message.params
        priority = params.priority if self._config.scheduling_policy == "priority" else 0
        prompt, outputs = (np.frombuffer(ids, np.int32) for ids in (message.prompt_token_ids, child.output_token_ids))
        request = Request(
            frontend_id=frontend_id,
            key=child.key,
            attempt=message.attempt,
            params=params,
            seed=child.seed,
            num_prompt_tokens=len(prompt),
            max_tokens=message.max_tokens,
            stop_token_ids=message.stop_token_ids,
            arrival_time=message.arrival_time,
            priority=priority,
            sort_key=sort_key_of(priority, message.arrival_time),
            tokens=np.concatenate([prompt, outputs]),
            num_tokens=len(prompt) + len(outputs),
            bad_words=message.bad_words,
            logits_processors=message.logits_processors,
            thought_markers=message.thought_markers,
            thought_end=message.thought_end,
            cache_root=root,
            pooling=message.pooling,
        )
        if index == 0 and params.prompt_logprobs is not None:
            request.note_prompt_logprobs(message.num_prompt_logprobs)
        return request


def reason_to_stop(request: Request) -> FinishReason | None:
    """Return why a resumed request's tokens end it already, if they do."""
    count = request.num_output_tokens
    if count and count >= request.params.min_tokens and int(request.tokens[-1]) in request.stop_token_ids:
        return "stop"
    return "length" if count >= request.max_tokens else None
