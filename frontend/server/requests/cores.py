"""Cores: the table of an engine's cores, by replica number, and the choice of a core for each request.

One core computes all answers of a request. An engine with one core has no router. Cores share no state, and a request
consists of its tokens, so that the requests of a lost core can continue on any other core. Knows no client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ....ipc.codec import num_ids
from ....ipc.messages.base import PING_INTERVAL_S
from ....ipc.messages.core import EngineCoreRequest, Load, Prefetch, Started
from ....ipc.messages.media import MediaSpan
from ....ipc.messages.supervisor import ReplicaDown, Served
from ....ipc.process.awake_clock import steady_time
from ....ipc.spec.config.engine_spec import EngineSpec
from ..replicas.core_load import OthersLoad
from ..replicas.prefix_keys import prefix_keys
from ..replicas.resume_pacer import ResumePacer
from ..replicas.resume_queue import ResumeQueue
from ..replicas.router import Router
from .core_client import CoreClient, FrontendOutbox
from .request_state import AnswerState, RequestState

NOWHERE = -1  # `RequestState.core` of a request that has no core


class Cores:
    """Owner of a CoreClient for each core, and of the router. Answers are identified by their keys."""

    def __init__(
        self,
        spec: EngineSpec,
        outbox: FrontendOutbox,
        monotonic: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = steady_time,
    ) -> None:
        num_cores = spec.num_cores
        self._outbox = outbox
        outbox.to_cores = [[] for _ in range(num_cores)]
        self.all = [CoreClient(spec.hello_to_core, unsent) for unsent in outbox.to_cores]
        self.given_up: set[int] = set()  # cores that will not be replaced
        self.next_ping_at = 0.0  # monotonic seconds
        self.are_remote = bool(spec.remote_cores)  # whether this is a gateway, whose cores may all be gone for a while
        self._router = Router() if num_cores > 1 or self.are_remote else None
        self._pacer = None if self._router is None else ResumePacer(self._router)
        self._drains_until: dict[int, float] = {}  # by core that drains: the end, monotonic seconds
        self._started: set[int] = set()  # keys of open answers that their core has started; empty without a router
        self._has_served = False
        self._monotonic, self._unix_time = monotonic, unix_time

    @property
    def is_up(self) -> bool:
        """Whether any core has welcomed this frontend."""
        return any(core.is_up for core in self.all)

    @property
    def are_all_up(self) -> bool:
        """Whether every core, except those given up, has welcomed this frontend."""
        return all(core.is_up for number, core in enumerate(self.all) if number not in self.given_up)

    @property
    def numbers(self) -> set[int]:
        """The replica numbers of the cores that are not given up."""
        return set(range(len(self.all))) - self.given_up

    # ── cores come and go ────────────────────────────────────────────────────────────────────────────────────────

    def connect(self) -> None:
        """Queue Hello to all cores. Called at the start."""
        for core in self.all:
            core.connect()

    def on_core_up(self, number: int) -> None:
        """Queue Hello to a new core, which no longer drains."""
        self._drains_until.pop(number, None)
        self.all[number].connect()

    def on_welcome(self, number: int) -> None:
        """Mark a core as up and let the router use it. The core has none of this frontend's requests."""
        self.all[number].is_up = True
        self.resume(number)

    def resume(self, number: int) -> None:
        """Let the router pick a core whose prefix cache is empty, since the core or its workers are new. Do nothing
        if the core is not up yet: `on_welcome` then calls this again."""
        if self._router is not None and self._pacer is not None and self.all[number].is_up:
            if number in self._router.loads:
                self._router.lose(number)
            self._router.add(number)
            self._pacer.forget(number)
            if number in self._drains_until:
                self._router.drain(number)

    def on_down(self, down: ReplicaDown) -> bool:
        """Stop routing to a core that is lost, or has lost its workers. Return whether its requests may continue on
        other cores; in an engine with one core they wait for its successor."""
        if self._router is None:
            return False
        if down.replica in self._router.loads:
            self._router.lose(down.replica)
        self.all[down.replica].is_up &= down.has_core
        if down.is_final:
            self.given_up.add(down.replica)
        return True

    # ── drains ───────────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self, number: int, limit_s: float) -> None:
        """Send no new requests to a core until `on_core_up`. Its answers may stay there for `limit_s`. Without a
        router, do nothing."""
        if self._router is not None:
            self._router.drain(number)
            self._drains_until[number] = self._monotonic() + limit_s

    @property
    def next_drain_end(self) -> float:
        """Earliest end of a drain, in monotonic seconds; inf if no core drains."""
        return min(self._drains_until.values(), default=math.inf)

    def drains_over(self, now: float) -> list[int]:
        """Return the draining cores whose time is over at `now`, so that their answers must move to other cores."""
        return [number for number, until in self._drains_until.items() if until <= now]

    def take_drained(self, busy: set[int]) -> list[int]:
        """Return the cores that have finished draining since the last call. busy: the cores that still have answers."""
        drained = [number for number in self._drains_until if number not in busy]
        for number in drained:
            del self._drains_until[number]
        return drained

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: RequestState) -> None:
        """Send a new request to the best core and set `request.core`. If the router has no core, set it to NOWHERE and
        send nothing. Without a router, a core that is not up gets the request after its Welcome."""
        message = request.to_core(self._unix_time())
        if self._router is not None:
            request.core = self._pick(message, self._router)
            if request.core == NOWHERE:
                return
        self.all[request.core].submit(message)

    def resume_waiting(self, waiting: ResumeQueue[RequestState]) -> float:
        """Send requests without a core to the best cores, in the order of the queue, until each core has as many tokens
        as the pacer allows. Return the time of the next call, in monotonic seconds; inf if no core is at its limit."""
        router, pacer, now = self._router, self._pacer, self._monotonic()
        if router is None or pacer is None:  # a single core gets its requests from `resubmit`
            return math.inf
        while (request := waiting.first) is not None:
            message = request.to_core(self._unix_time())
            keys, num_prompt = _keys_of(message), num_ids(message.prompt_token_ids)
            num_tokens = num_prompt + sum(num_ids(child.output_token_ids) for child in message.children)
            if (core := pacer.pick(keys, num_prompt, num_tokens, now)) is None:
                break
            waiting.pop()
            request.core = core
            self._note_sent(message, core, keys, router)
            self.all[core].submit(message)
        return pacer.end()

    def resubmit(self, request: RequestState) -> None:
        """Send a request to its core again, since the core does not have it."""
        message = request.to_core(self._unix_time())
        if self._router is not None:
            self._note_sent(message, request.core, _keys_of(message), self._router)
        self.all[request.core].submit(message)

    @property
    def has_any(self) -> bool:
        """Whether the router has a core to pick. False without a router."""
        return self._router is not None and bool(self._router.cores)

    def _pick(self, message: EngineCoreRequest, router: Router) -> int:
        keys = _keys_of(message)
        name = message.params.prompt_cache_key
        favorite = router.favorite(name) if name else None
        core = router.pick(keys, num_ids(message.prompt_token_ids), self._monotonic(), favorite=favorite)
        if core is None:
            return NOWHERE
        self._note_sent(message, core, keys, router)
        return core

    def pick_for_prefetch(self, message: Prefetch) -> int:
        """Return the core that is to load a prompt's blocks, and let the router send requests with the same prefix to
        that core. Requires that all cores are up."""
        if (router := self._router) is None:
            return 0
        prompt = message.prompt_token_ids
        keys = _keys(prompt, message.cache_salt, message.adapter_digest, message.media)
        core = router.pick(keys, num_ids(prompt), self._monotonic())
        if core is None:  # all workers are being replaced
            return min(self.numbers)
        router.on_prefetched(core, keys)
        return core

    def _note_sent(self, message: EngineCoreRequest, core: int, keys: list[int], router: Router) -> None:
        if core not in router.loads:
            return
        now, num_prompt = self._monotonic(), num_ids(message.prompt_token_ids)
        for child in message.children:
            if child.key not in router.open:
                router.on_sent(child.key, core, keys, num_prompt + num_ids(child.output_token_ids), now)

    def abort(self, number: int, keys: list[int]) -> None:
        """Abort answers on core `number`, because they have ended in this frontend or move to another core."""
        if number == NOWHERE:
            return
        if self._router is not None:
            for key in keys:
                self._forget(key, 0, self._router)
        self.all[number].abort(keys)

    def was_in_work(self, key: int, down: ReplicaDown) -> bool:
        """Return whether a lost core had started to compute the answer with this key, or was about to."""
        return key in self._started or key in down.touched

    def on_outputs(self, all_started: Iterable[Started], answers: Sequence[AnswerState]) -> None:
        """Update the router from one message of a core: `all_started`, and `answers` with new tokens or an end. The
        first output also queues Served to the supervisor."""
        if answers and not self._has_served:
            self._has_served = True
            self._outbox.to_supervisor.append(Served())
        if (router := self._router) is None:
            return
        now = self._monotonic()
        for started in all_started:
            if started.key in router.open:
                self._started.add(started.key)
                router.on_started(started.key, started.num_cached_tokens)
        for answer in answers:
            if answer.finish_reason is not None:
                self._forget(answer.key, len(answer.token_ids), router)
            elif (sent := router.open.get(answer.key)) is not None and not sent.first_token_at:
                router.on_first_token(answer.key, now)

    def on_load(self, number: int, load: Load) -> None:
        """Pass the load that other frontends have put on a core to the router."""
        if self._router is not None and number in self._router.loads:
            self._router.on_load(number, OthersLoad(load.waiting_tokens, load.num_open))

    def _forget(self, key: int, num_tokens: int, router: Router) -> None:
        self._started.discard(key)
        if key in router.open:
            router.on_finished(key, num_tokens, self._monotonic())

    # ── orders and pings ─────────────────────────────────────────────────────────────────────────────────────────

    def prefetch(self, number: int, message: Prefetch) -> None:
        self.all[number].prefetch(message)

    def keep_alive(self, now: float) -> None:
        """Ping the cores that are up, and set `next_ping_at`, the time of the next call while requests are open."""
        if self.is_up:
            self.next_ping_at = now + PING_INTERVAL_S
            for core in self.all:
                core.ping()


def _keys_of(message: EngineCoreRequest) -> list[int]:
    """Return the router's keys of a request's prompt."""
    digest = b"" if message.adapter is None else message.adapter.digest
    return _keys(message.prompt_token_ids, message.params.cache_salt, digest, message.media)


def _keys(prompt: bytes, cache_salt: str | None, adapter_digest: bytes, media: list[MediaSpan]) -> list[int]:
    """Return the router's keys of a prompt. Prompts that differ in salt, adapter or media have no key in common."""
    others = (cache_salt, adapter_digest, media)
    return prefix_keys(prompt, msgspec.msgpack.encode(others) if any(others) else b"")
