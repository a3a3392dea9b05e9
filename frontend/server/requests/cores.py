"""Cores: the table of an engine's cores, by replica, and the choice between them.

A request belongs to one core, with all its answers. With a table of one there is no choice, hence no router and no
work for it. Several cores share nothing, so a lost core's requests can go on at any other one: a request is its
tokens. Knows no client.
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

NOWHERE = -1  # the core of a request while none is up


class Cores:
    """Owns a CoreClient for each core, and the router. Answers are known here by their keys."""

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
        self.given_up: set[int] = set()  # these do not come back
        self.next_ping_at = 0.0  # monotonic seconds
        self.are_remote = bool(spec.remote_cores)  # of a gateway; they may all be away
        self._router = Router() if num_cores > 1 or self.are_remote else None
        self._pacer = None if self._router is None else ResumePacer(self._router)
        self._drains_until: dict[int, float] = {}  # cores that drain, with monotonic times; only with a router
        self._started: set[int] = set()  # keys of answers that have left their core's queue; only with a router
        self._has_served = False
        self._monotonic, self._unix_time = monotonic, unix_time

    @property
    def is_up(self) -> bool:
        """Whether any core has welcomed this frontend."""
        return any(core.is_up for core in self.all)

    @property
    def are_all_up(self) -> bool:
        """Whether every core that is not given up has."""
        return all(core.is_up for number, core in enumerate(self.all) if number not in self.given_up)

    @property
    def numbers(self) -> set[int]:
        """The cores that are not given up."""
        return set(range(len(self.all))) - self.given_up

    # ── cores come and go ────────────────────────────────────────────────────────────────────────────────────────

    def connect(self) -> None:
        """Queue Hello to all cores; called at the start."""
        for core in self.all:
            core.connect()

    def on_core_up(self, number: int) -> None:
        """Greet a new core."""
        self._drains_until.pop(number, None)
        self.all[number].connect()

    def on_welcome(self, number: int) -> None:
        """Use a core, which has welcomed this frontend and knows none of its requests."""
        self.all[number].is_up = True
        self.resume(number)

    def resume(self, number: int) -> None:
        """Let the router pick a core whose prefix cache is empty: it is new, or its workers are. One that is not up
        yet waits for its Welcome."""
        if self._router is not None and self._pacer is not None and self.all[number].is_up:
            if number in self._router.loads:
                self._router.lose(number)
            self._router.add(number)
            self._pacer.forget(number)
            if number in self._drains_until:
                self._router.drain(number)

    def on_down(self, down: ReplicaDown) -> bool:
        """Pick a core no more that is lost, or has lost its workers. Return whether its requests may go on elsewhere:
        not in a table of one, where they wait for the next core."""
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
        """Send nothing new to a core until `on_core_up`; its answers may go on for `limit_s`."""
        if self._router is not None:
            self._router.drain(number)
            self._drains_until[number] = self._monotonic() + limit_s

    @property
    def next_drain_end(self) -> float:
        """When the first of the cores that drain is to be left by its answers; monotonic seconds."""
        return min(self._drains_until.values(), default=math.inf)

    def drains_over(self, now: float) -> list[int]:
        """Return the cores that are to be left by their answers now."""
        return [number for number, until in self._drains_until.items() if until <= now]

    def take_drained(self, busy: set[int]) -> list[int]:
        """Return the cores that have drained since the last call. busy: those that have answers."""
        drained = [number for number in self._drains_until if number not in busy]
        for number in drained:
            del self._drains_until[number]
        return drained

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: RequestState) -> None:
        """Send a new request to the best core. If none is up, it is sent to the next one that is."""
        message = request.to_core(self._unix_time())
        if self._router is not None:
            request.core = self._pick(message, self._router)
            if request.core == NOWHERE:
                return
        self.all[request.core].submit(message)

    def resume_waiting(self, waiting: ResumeQueue[RequestState]) -> float:
        """Send requests that have lost their core, or found none, to the best ones, in their order, until all cores
        have got enough. Return when to call again for those that are left, monotonic seconds."""
        router, pacer, now = self._router, self._pacer, self._monotonic()
        if router is None or pacer is None:  # with one core requests wait for it
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
        """Send a request again to its core, which does not know it."""
        message = request.to_core(self._unix_time())
        if self._router is not None:
            self._note_sent(message, request.core, _keys_of(message), self._router)
        self.all[request.core].submit(message)

    @property
    def has_any(self) -> bool:
        """Whether there is a core that the router can pick."""
        return self._router is not None and bool(self._router.cores)

    def _pick(self, message: EngineCoreRequest, router: Router) -> int:
        keys = _keys_of(message)
        core = router.pick(keys, num_ids(message.prompt_token_ids), self._monotonic())
        if core is None:
            return NOWHERE
        self._note_sent(message, core, keys, router)
        return core

    def pick_for_prefetch(self, message: Prefetch) -> int:
        """Return the core that is to load a prompt's blocks, and send requests that begin like it there, too. All
        cores are up."""
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
        """Abort answers at their core, which have ended here or go on elsewhere."""
        if number == NOWHERE:
            return
        if self._router is not None:
            for key in keys:
                self._forget(key, 0, self._router)
        self.all[number].abort(keys)

    def was_in_work(self, key: int, down: ReplicaDown) -> bool:
        """Whether a lost core had begun to compute this answer, or was about to."""
        return key in self._started or key in down.touched

    def on_outputs(self, all_started: Iterable[Started], answers: Sequence[AnswerState]) -> None:
        """Learn from one message of a core: started answers, and answers with new tokens or ends."""
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
        """Learn what other frontends have sent a core."""
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
        """Ping the cores that are up, and set `next_ping_at`. Call it then, while a core has requests."""
        if self.is_up:
            self.next_ping_at = now + PING_INTERVAL_S
            for core in self.all:
                core.ping()


def _keys_of(message: EngineCoreRequest) -> list[int]:
    """Return the router's keys of a request's prompt."""
    digest = b"" if message.adapter is None else message.adapter.digest
    return _keys(message.prompt_token_ids, message.params.cache_salt, digest, message.media)


def _keys(prompt: bytes, cache_salt: str | None, adapter_digest: bytes, media: list[MediaSpan]) -> list[int]:
    """Return the router's keys of a prompt: prompts with another salt, adapter or other media share no blocks."""
    others = (cache_salt, adapter_digest, media)
    return prefix_keys(prompt, msgspec.msgpack.encode(others) if any(others) else b"")
