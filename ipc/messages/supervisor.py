"""supervisor ⇄ children, ROUTER/DEALER: start, readiness, progress, stop."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ErrorInfo
from ..process.log import LogLevel
from .base import Hello, Holding, Message, Ping, Pong


class Phase(Message, frozen=True, kw_only=True, tag="phase"):
    """A start-up phase is over; printed by the supervisor."""

    name: str
    duration_s: float
    detail: str = ""


class PhaseProgress(Message, frozen=True, kw_only=True, tag="phase_progress"):
    """How far a start-up phase that takes long has come, every few seconds; printed by the supervisor."""

    name: str
    num_done: int
    num_all: int
    unit: str  # of both, in the plural


class Measured(Message, frozen=True, kw_only=True, tag="measured"):
    """How many KV blocks this rank has room for, and what computes."""

    max_blocks: int
    block_bytes: int
    device: str
    kernels: str = ""  # for people: "C kernels, AVX2, prebuilt", "plain torch: " and the reason


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    pass


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The child cannot start or go on, in one line; it exits after this."""

    error: ErrorInfo


class SetLogLevel(Message, frozen=True, kw_only=True, tag="set_log_level"):
    """From a frontend, for a client: every process shall log what is at least this bad. The supervisor keeps it for
    processes that it starts later, and says the same to all children."""

    level: LogLevel


class Drained(Message, frozen=True, kw_only=True, tag="drained"):
    """Answers Drain: every client has been sent all that it asked for."""


class ReplaceWorkers(Message, frozen=True, kw_only=True, tag="replace_workers"):
    """The core cannot go on with this worker group."""

    generation: int
    reason: str


class Reloading(Message, frozen=True, kw_only=True, tag="reloading"):
    """To the supervisor: the workers shall hold other weights, or none. It notes that what they hold is uncertain and
    says the same back; only then do they get the order."""

    generation: int
    holding: Holding


class Reloaded(Message, frozen=True, kw_only=True, tag="reloaded"):
    """To the supervisor: all ranks hold them. It notes that new workers do so too and says the same back; only then is
    the client answered."""

    generation: int


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """The core's state, passed on to the frontends."""

    step: int
    step_age_s: float
    num_running: int
    num_waiting: int
    num_deferred: int = 0  # of those that wait: for something else than capacity, such as a grammar
    num_free_blocks: int = 0
    kv_map: bytes = b""  # of some blocks of the pool, evenly spread: 0 empty, 1 cached, 2 used, 3 shared
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0  # this and what follows: totals since this core's start, for the metrics
    num_queried_tokens: int = 0  # looked up in the prefix cache
    num_hit_tokens: int = 0
    num_scheduled_tokens: int = 0
    schedule_s: float = 0.0
    send_s: float = 0.0
    execute_s: float = 0.0
    host_s: float = 0.0  # taking results in
    num_rows_in_steps: int = 0
    num_steps_by_rows: list[int] = []  # of at most 1, 2, 4, 8 … 4096 rows and more than the one before; larger ones
    num_step_tokens: int = 0  # of steps: tokens of prompts that they completed, cached ones too, and generated
    num_steps_by_tokens: list[int] = []  # as num_steps_by_rows, up to 16384
    num_refused_for_requests: int = 0  # as the queue held too many answers
    num_refused_for_tokens: int = 0  # as it held too many prompt tokens
    num_steps_in_flight: int = 0
    num_restarts: int = 0  # this and what follows: the supervisor's
    num_http_requests_cut: int = 0  # which lost frontends left without the end of their answer
    worker_memory_bytes: list[int] = []  # resident, by rank
    last_failure: str = ""
    is_core_up: bool = True
    is_asleep: bool = False
    is_paused: bool = False


ChildToSupervisor: TypeAlias = (
    Hello
    | Phase
    | PhaseProgress
    | Measured
    | Ready
    | Failed
    | Drained
    | ReplaceWorkers
    | Reloading
    | Reloaded
    | SetLogLevel
    | Progress
    | Pong
)


class Initialize(Message, frozen=True, kw_only=True, tag="initialize"):
    """The pool's size, the least of all ranks."""

    num_blocks: int


class StartPhase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A Phase of one of the processes that live now."""

    process: str
    name: str
    ended_s: float  # since the engine's start
    duration_s: float
    detail: str = ""


class StartPhases(Message, frozen=True, kw_only=True, tag="start_phases"):
    """To frontends: how all processes that live now have started, in the order in which it happened."""

    phases: list[StartPhase]
    kernels: str = ""  # of Measured, each that a rank named once


class WorkersUp(Message, frozen=True, kw_only=True, tag="workers_up"):
    """A new worker group has loaded and listens on the addresses of its generation."""

    generation: int


class WorkersDown(Message, frozen=True, kw_only=True, tag="workers_down"):
    """The group has ended; another is being started."""

    generation: int
    reason: str


class CoreUp(Message, frozen=True, kw_only=True, tag="core_up"):
    """To frontends: a new core is there and knows nothing; say Hello and submit again."""

    core_epoch: int


class FrontendDown(Message, frozen=True, kw_only=True, tag="frontend_down"):
    """To the core: this frontend has ended; its clients will submit again through the next."""

    identity: bytes


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """To frontends: refuse new requests and finish those that are open; answered by Drained."""

    clients_return_s: float = 0.0  # a frontend was lost: for so long its clients may come with what it had open


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Exit now."""

    reason: str = ""  # what ended the engine, if nobody asked for it


SupervisorToChild: TypeAlias = (
    Initialize
    | StartPhases
    | WorkersUp
    | WorkersDown
    | Reloading
    | Reloaded
    | CoreUp
    | FrontendDown
    | SetLogLevel
    | Drain
    | Stop
    | Progress
    | Ping
)
