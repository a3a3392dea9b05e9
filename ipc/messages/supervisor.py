"""Messages between the supervisor and its child processes, over ROUTER/DEALER: start, readiness, progress, loss and
stop."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ErrorInfo
from ..kv.pool_shape import PoolShape
from ..process.arena import ArenaShape
from ..process.log import LogLevel
from .adapter import AdaptersProgress
from .base import Hello, Message, MissReason, Ping, Pong
from .media import EncoderProgress
from .orders import Held, Hold, Order, Ordered
from .tier import TiersProgress


class Phase(Message, frozen=True, kw_only=True, tag="phase"):
    """Report of a start-up phase that has ended; the supervisor prints it."""

    name: str
    duration_s: float
    detail: str = ""


class PhaseProgress(Message, frozen=True, kw_only=True, tag="phase_progress"):
    """Progress of a long start-up phase, every few seconds; the supervisor prints it."""

    name: str
    num_done: int
    num_all: int
    unit: str  # unit of num_done and num_all, in the plural


class Measured(Message, frozen=True, kw_only=True, tag="measured"):
    """Report of a rank: the memory that it has for the KV pool, its device and its kernels."""

    pool_bytes: int
    block_bytes: tuple[int, ...]  # of a block of each KV group; empty: memory is asleep, and nothing was measured
    device: str
    kernels: str = ""  # for users: "C kernels, AVX2, prebuilt", or "plain torch: " and the reason
    has_exact_drafts: bool = False  # a token has the same bits alone and with drafts after it
    free_bytes: int = 0  # memory that its host has free for this replica, after the weights


class AnswersPings(Message, frozen=True, kw_only=True, tag="answers_pings"):
    """Notice of a frontend that is not ready yet: its loop runs, so that its silence is a hang from now on."""


class Loaded(Message, frozen=True, kw_only=True, tag="loaded"):
    """Notice of a spare frontend: it has loaded all that it can, and waits for TakeOver."""


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    pass


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """Last message of a child that cannot start or continue."""

    error: ErrorInfo


class ReplicaDrained(Message, frozen=True, kw_only=True, tag="replica_drained"):
    """Reply to DrainReplica: this frontend has no answers at the replica."""

    replica: int


class Served(Message, frozen=True, kw_only=True, tag="served"):
    """Notice of a frontend, sent once: it has received output of an answer, so the process works."""


class Drained(Message, frozen=True, kw_only=True, tag="drained"):
    """Reply to Drain: all open requests have finished and all output was sent."""


class Meeting(Message, frozen=True, kw_only=True, tag="meeting"):
    """Address of the store at which the ranks of a group on several hosts meet, sent by its first rank; the supervisor
    forwards it to all ranks."""

    generation: int
    address: str


class Listening(Message, frozen=True, kw_only=True, tag="listening"):
    """Addresses of a core's sockets for ranks on other hosts; the supervisor forwards them to all ranks."""

    generation: int
    steps: str
    results: str


class HostPlaced(Message, frozen=True, kw_only=True, tag="host_placed"):
    """Notice of the launcher: Ray has started an agent on another host, or has reserved devices of this host."""

    placement: str  # equal to that in the agent's HostHello; empty: this host
    address: str  # of the host
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES for this host; None: unchanged


class HostGone(Message, frozen=True, kw_only=True, tag="host_gone"):
    """Notice of the launcher: an agent, or the node that it was on, has ended."""

    placement: str
    reason: str


class ReplaceWorkers(Message, frozen=True, kw_only=True, tag="replace_workers"):
    """Request of the core to replace a failed worker group."""

    generation: int
    reason: str


class DraftSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals of the drafts from one source."""

    name: str
    num_drafted: int
    num_accepted_by_position: list[int]  # by position in the draft


class SpeculationProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals of speculation since the core's start."""

    sources: list[DraftSource] = []
    num_steps_by_drafts: dict[int, int] = {}  # number of a row's drafts in a step → results with that number
    num_expected: float = 0.0  # accepted drafts that were expected when the drafts were sent
    num_corpus_tokens: int = 0


class KVGroupState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks of one of several KV groups."""

    name: str
    num_used_blocks: int = 0  # that requests hold
    num_free_blocks: int = 0  # the others in slabs of the group
    num_cached_blocks: int = 0  # that lookups find, used or free
    num_unusable_tokens: int = 0  # total of tokens that other groups had keys of, and this one lacked
    num_moved_slabs: int = 0  # total of slabs that the group took from others
    num_snapshots: dict[str, int] = {}  # total of states that rows have left, by the reason


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """Report of the core's state; the supervisor forwards it to the frontends."""

    step: int
    step_age_s: float
    num_running: int
    num_waiting: int
    num_deferred: int = 0  # waiting requests that need something other than capacity, such as a grammar
    num_flex: int = 0  # of the others of num_waiting: those of the flex class, which wait for what others leave
    num_blocks: int = 0  # blocks in the KV pools of the cores that run; 0: none runs
    num_free_blocks: int = 0
    kv_map: bytes = b""  # a byte for each of a sample of blocks, evenly spread: 0 empty, 1 cached, 2 used, 3 shared
    kv_groups: list[KVGroupState] = []  # empty if all layers are in one
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0  # this and the following are totals since this core's start, for the metrics
    num_queried_tokens: int = 0  # tokens looked up in the prefix cache
    num_hit_tokens: int = 0
    num_missed_tokens: dict[MissReason, int] = {}  # of prompts: computed before, and not found
    num_scheduled_tokens: int = 0
    schedule_s: float = 0.0
    send_s: float = 0.0
    execute_s: float = 0.0
    host_s: float = 0.0  # seconds for the processing of results
    num_rows_in_steps: int = 0
    num_steps_by_rows: list[int] = []  # histogram: upper bounds 1, 2, 4 … 4096 rows, then an open bucket
    num_step_tokens: int = 0  # tokens of prompts that steps completed, cached ones included, and generated tokens
    num_steps_by_tokens: list[int] = []  # like num_steps_by_rows, up to 16384 tokens
    num_refused_for_requests: int = 0  # refused because too many answers were waiting
    num_refused_for_tokens: int = 0  # refused because too many prompt tokens were waiting
    num_steps_in_flight: int = 0
    tiers: TiersProgress | None = None  # None: all blocks are in the pool
    adapters: AdaptersProgress | None = None  # None: the engine serves no adapters
    encoder: EncoderProgress | None = None  # None: the model takes no media
    speculation: SpeculationProgress | None = None  # None: it is off
    num_restarts: int = 0  # this and the following are added by the supervisor
    frontends: list[str] = []  # identities of the frontends that are ready
    num_http_answers_resumed: int = 0  # HTTP answers that went on after the loss of their frontend
    num_http_answers_cut: dict[str, int] = {}  # those that did not, by reason
    worker_memory_bytes: list[int] = []  # resident memory of each rank
    last_failure: str = ""
    is_core_up: bool = True
    obstacle: str = ""  # why the start of the workers has to wait
    is_asleep: bool = False
    is_paused: bool = False


class TierListening(Message, frozen=True, kw_only=True, tag="tier_listening"):
    """Address for the core of a tier process on another host, sent before its Ready; TierUp forwards it."""

    address: str


ChildToSupervisor: TypeAlias = (
    Hello
    | Phase
    | PhaseProgress
    | Measured
    | AnswersPings
    | Loaded
    | Ready
    | Failed
    | Drained
    | Meeting
    | Listening
    | HostPlaced
    | HostGone
    | TierListening
    | ReplaceWorkers
    | Order
    | Held
    | ReplicaDrained
    | Served
    | Progress
    | Pong
)


class Initialize(Message, frozen=True, kw_only=True, tag="initialize"):
    """Order to children to start with these sizes of the KV pool, the minimum over all ranks, and of the arena."""

    pool: PoolShape
    arena: ArenaShape | None = None  # None: no KV tiers
    kernels: str = ""  # those of all ranks' Measured, without repetitions
    has_exact_drafts: bool = False  # whether all ranks have them
    num_all_blocks: int = 0  # to frontends: usable blocks of all replicas; `pool` is then the smallest replica's
    max_model_len: int = 0  # to frontends: the longest request that all replicas have room for


class StartPhase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A start-up phase of a process that is running."""

    process: str
    name: str
    ended_s: float  # seconds from the engine's start to the phase's end
    duration_s: float
    detail: str = ""


class StartPhases(Message, frozen=True, kw_only=True, tag="start_phases"):
    """The start-up phases of all running processes, in order of time; sent to frontends."""

    phases: list[StartPhase]
    kernels: str = ""  # of Measured, without repetitions


class PlacesTaken(Message, frozen=True, kw_only=True, tag="places_taken"):
    """Notice to the launcher: the placements of the hosts that have a place now; "" for one that was started by
    hand."""

    placements: list[str]


class WorkersUp(Message, frozen=True, kw_only=True, tag="workers_up"):
    """Notice to the core and to frontends that a new worker group has loaded; it connects to its generation's
    addresses."""

    generation: int
    replica: int = 0


class WorkersDown(Message, frozen=True, kw_only=True, tag="workers_down"):
    """Notice to the core that a worker group has ended and another is being started."""

    generation: int
    reason: str


class TierUp(Message, frozen=True, kw_only=True, tag="tier_up"):
    """Notice to the core that new tier processes run, one on each host with ranks. The one on this host has the address
    for `number`."""

    number: int
    others: tuple[str, ...] = ()  # addresses of the tier processes on other hosts, in the hosts' order


class TierDown(Message, frozen=True, kw_only=True, tag="tier_down"):
    """Notice to the core that the tier processes have ended and been reaped, so that no slot is written any more."""

    number: int


class ArenaLost(Message, frozen=True, kw_only=True, tag="arena_lost"):
    """Notice to the core that a host is lost, and with it a part of every slot, so that no slot has content any more.
    It is sent before the TierUp and WorkersUp of the processes that share the next arena."""

    arena: int  # number of the next arena


class CoreUp(Message, frozen=True, kw_only=True, tag="core_up"):
    """Notice to frontends that a new core runs, which has no requests: frontends send Hello and resubmit theirs."""

    core_epoch: int
    replica: int = 0


class ReplicaDown(Message, frozen=True, kw_only=True, tag="replica_down"):
    """Notice to frontends that the core or the workers of a replica have ended: its answers continue on another
    replica, if there is one. CoreUp or WorkersUp follows once they are replaced."""

    replica: int
    reason: str
    has_core: bool = False  # only workers have ended: the core keeps its answers until they are aborted
    is_final: bool = False  # the replica is not started again
    touched: list[int] = []  # keys of the answers that the core touched last; it may not have announced their start


class DrainReplica(Message, frozen=True, kw_only=True, tag="drain_replica"):
    """Order to frontends to send no new requests to a replica, and to move its answers to others after `limit_s`. The
    reply is ReplicaDrained; CoreUp ends the order."""

    replica: int
    limit_s: float


class HandOver(Message, frozen=True, kw_only=True, tag="hand_over"):
    """Order to a frontend to end after its turn; its successor goes on with its HTTP connections."""


class TakeOver(Message, frozen=True, kw_only=True, tag="take_over"):
    """Order to a spare frontend to go on with the work of the one before, which has ended."""


class SetLogLevel(Message, frozen=True, kw_only=True, tag="set_log_level"):
    """Order to log at this level from now on, to all children, also to those that start later."""

    level: LogLevel


class FrontendDown(Message, frozen=True, kw_only=True, tag="frontend_down"):
    """Notice to the core that a frontend has ended; its clients resubmit their requests through the next one."""

    identity: bytes


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """Order to frontends to refuse new requests and finish the open ones. The reply is Drained."""

    clients_return_s: float = 0.0  # seconds to wait for clients of a crashed frontend to resubmit


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Order to exit now."""

    reason: str = ""  # cause, if the end was not requested


SupervisorToChild: TypeAlias = (
    Initialize
    | Meeting
    | Listening
    | StartPhases
    | PlacesTaken
    | WorkersUp
    | WorkersDown
    | TierUp
    | TierDown
    | ArenaLost
    | Hold
    | Ordered
    | CoreUp
    | ReplicaDown
    | DrainReplica
    | HandOver
    | TakeOver
    | FrontendDown
    | SetLogLevel
    | Drain
    | Stop
    | Progress
    | Ping
)
