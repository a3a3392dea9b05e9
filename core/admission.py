"""Admission: refuses requests that can never fit, and new ones while the queue is full."""

from __future__ import annotations

import numpy as np

from ..ipc.codec import decode_ids, num_ids
from ..ipc.errors import Overloaded, RequestError
from ..ipc.messages.adapter import AdapterRef
from ..ipc.messages.base import FinishReason
from ..ipc.messages.core import EngineCoreRequest, TenantRef
from ..ipc.messages.media import A_MEDIUM, MediaSpan
from ..ipc.process.awake_clock import steady_time
from ..ipc.spec.config.engine_spec import EngineSpec
from .kv.block_hash import random_namespace
from .request import Request
from .scheduling.scheduler import Scheduler
from .stats import CoreStats

FLEX_S = 1e12  # by which the flex class comes later in the order: more than any priority is worth
AGING_S = 60.0  # under the priority policy, waiting this long is worth one level, so that nothing starves


class Admission:
    """Check of requests against the configured limits, the queue's content and the pool's size. It also turns a checked
    message into Requests. Owns nothing; `stats` is only used to count refusals and to estimate when to retry."""

    def __init__(self, spec: EngineSpec, scheduler: Scheduler, stats: CoreStats) -> None:
        self._config, self._max_model_len = spec.config, spec.max_model_len
        self._has_state = spec.model.has_state  # then no blocks are shared, not even within a request
        self._max_tokens = spec.max_request_tokens
        self._most_whole = spec.max_num_batched_tokens if spec.model.is_encoder else None  # tokens of a whole prompt
        self._encoder_cache_tokens = spec.encoder_cache_tokens
        self._kv_cache, self._waiting, self._tenants = scheduler.kv_cache, scheduler.waiting, scheduler.tenants
        self._stats = stats

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RequestError if the request can never fit, exceeds one request's share of the queue, or has an adapter
        or media that this engine does not take; Overloaded if it may fit later. A resubmission (an answer has tokens)
        is never refused because of the queue."""
        num_prompt = num_ids(message.prompt_token_ids)
        self._check_size(num_prompt, message.max_tokens, is_pooled=message.pooling is not None)
        if message.adapter is not None:
            self._check_adapter(message.adapter)
        if message.media:
            self._check_media(message.media)
        if any(child.output_token_ids for child in message.children):
            return
        config, num_answers = self._config, len(message.children)
        self._check_share(num_prompt, num_answers)
        is_flex = message.params.is_flex
        waiting = self._waiting.count_of(is_flex=is_flex)
        has_too_many = waiting.num_requests + num_answers > config.max_waiting_requests
        has_too_many_tokens = waiting.num_tokens + num_prompt * num_answers > config.max_waiting_tokens
        if (has_too_many or has_too_many_tokens) and not self._is_in_part(message.tenant):
            self._stats.num_refused_for_requests += has_too_many
            self._stats.num_refused_for_tokens += not has_too_many
            of_class = "of the flex class, " if is_flex else ""
            raise Overloaded(
                f"{of_class}{waiting.num_requests} requests with {waiting.num_tokens} tokens wait, at most "
                f"{config.max_waiting_requests} and {config.max_waiting_tokens} may: ask again later",
                retry_after_s=self._stats.seconds_to_drain(waiting.num_tokens),
            )

    def _is_in_part(self, ref: TenantRef | None) -> bool:
        """Return whether the tenant of a request has less than its part of the queue, while others wait, too: a full
        queue of one tenant refuses no other, and the queue holds at most twice as much as all together may have."""
        tenant = self._tenants.of(ref)
        if tenant.num_waiting == len(self._waiting):
            return False
        part = self._tenants.part(tenant)
        has_few = tenant.num_waiting < part * self._config.max_waiting_requests
        return has_few and tenant.num_waiting_tokens < part * self._config.max_waiting_tokens

    def _check_adapter(self, adapter: AdapterRef) -> None:
        if not self._config.enable_lora:
            raise RequestError("the request names an adapter, the engine serves none: start it with --enable-lora")
        if adapter.rank > self._config.max_lora_rank:
            raise RequestError(
                f"the adapter {adapter.place} has rank {adapter.rank}, at most {self._config.max_lora_rank} is "
                "served: raise --max-lora-rank"
            )

    def _check_media(self, media: list[MediaSpan]) -> None:
        if not self._encoder_cache_tokens:
            raise RequestError(f"the prompt has {A_MEDIUM[media[0].kind]}, the model takes none: send text alone")
        largest = max(media, key=lambda span: span.num_embeds)
        if largest.num_embeds > self._encoder_cache_tokens:
            raise RequestError(
                f"{A_MEDIUM[largest.kind]} becomes {largest.num_embeds} embeddings, the encoder cache holds "
                f"{self._encoder_cache_tokens}: send a smaller one or raise --encoder-cache-tokens"
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
        """Raise RequestError unless prompt and `max_tokens` fit into max_model_len and into an empty KV pool, and for
        an empty prompt. A prompt to embed has no output tokens: its `max_tokens` of 1 does not count."""
        num_needed = self._kv_cache.sizes.num_blocks_for(num_prompt + max_tokens - 1)
        if num_prompt < 1 or num_prompt + max_tokens - is_pooled > self._max_model_len:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} do not fit max_model_len "
                f"{self._max_model_len}: shorten the prompt or lower max_tokens"
            )
        if self._most_whole is not None and num_prompt > self._most_whole:
            raise RequestError(
                f"{num_prompt} prompt tokens are computed in one step, which has at most {self._most_whole}: shorten "
                "the prompt or raise --max-num-batched-tokens"
            )
        if num_needed > self._kv_cache.num_usable_blocks:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {num_needed} KV blocks of "
                f"{self._config.block_size}, the pool has {self._kv_cache.num_usable_blocks}: shorten the request or "
                "raise --num-kv-blocks"
            )

    def requests_of(self, frontend_id: int, message: EngineCoreRequest) -> list[Request]:
        """Return the requests of a checked message, one for each answer. Answers that may not read the prefix cache
        still share their prompt's blocks, by keys from a random root, unless the model's layers keep states."""
        params, config, prompt = message.params, self._config, np.frombuffer(message.prompt_token_ids, np.int32)
        priority = params.priority if config.scheduling_policy == "priority" else 0
        is_private = params.skip_reading_prefix_cache or not config.enable_prefix_caching
        is_sharing = is_private and len(message.children) > 1 and not self._has_state
        root = random_namespace() if is_sharing else None
        arrival_time = message.arrival_time if message.waited_s is None else steady_time() - message.waited_s
        triggers = frozenset(decode_ids(message.constraint_triggers).tolist())
        tenant = self._tenants.of(message.tenant)
        requests = []
        for child in message.children:
            tokens = np.concatenate([prompt, np.frombuffer(child.output_token_ids, np.int32)])
            request = Request(
                frontend_id=frontend_id,
                key=child.key,
                attempt=message.attempt,
                params=params,
                seed=child.seed,
                num_prompt_tokens=len(prompt),
                max_tokens=message.max_tokens,
                stop_token_ids=message.stop_token_ids,
                arrival_time=arrival_time,
                priority=priority,
                sort_key=message.arrival_time + AGING_S * priority + FLEX_S * params.is_flex,
                is_flex=params.is_flex,
                tokens=tokens,
                num_tokens=len(tokens),
                bad_words=message.bad_words,
                logits_processors=message.logits_processors,
                thought_markers=message.thought_markers,
                constraint_begins=message.constraint_begins,
                constraint_triggers=triggers,
                constraint_repeats=message.constraint_repeats,
                cache_root=root,
                pooling=message.pooling,
                adapter=message.adapter,
                media=message.media,
                caller=message.caller,
                tenant=tenant,
            )
            requests.append(request)
        if params.prompt_logprobs is not None:
            requests[0].note_prompt_logprobs(message.num_prompt_logprobs)
        return requests


def reason_to_stop(request: Request) -> FinishReason | None:
    """Return "stop" or "length" if the tokens of a resumed request end it already, else None."""
    count = request.num_output_tokens
    if count and count >= request.params.min_tokens and int(request.tokens[-1]) in request.stop_token_ids:
        return "stop"
    return "length" if count >= request.max_tokens else None
