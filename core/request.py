"""Request: one answer being generated, with its tokens, parameters, blocks and state.

A client's request for n answers becomes n of these. Knows no text and no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..ipc.messages.adapter import NO_SLOT, AdapterRef
from ..ipc.messages.core import ConstraintBegin
from ..ipc.messages.media import MediaSpan
from ..ipc.messages.tier import PlaceName
from ..ipc.params.pooling_params import PoolingParams
from ..ipc.params.sampling_params import SamplingParams
from .tenant import Tenant

Ids: TypeAlias = npt.NDArray[np.int32]

ALL_KNOWN = 1 << 30


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class WaitReason(Enum):
    """Reason not to admit a request yet, even if a row and blocks are free; `WaitingQueue.release` removes it."""

    GRAMMAR = auto()  # its grammar is being compiled
    PROMPT = auto()  # another answer of its prompt group computes the prompt
    TIER = auto()  # its blocks are on their way from a disk, a remote store or a peer
    ADAPTER = auto()  # its adapter is in no slot of the workers
    BLOB = auto()  # its adapter or media are on their way from a gateway
    TURN = auto()  # it pools, and the next step has no tokens for it


LEGAL_MOVES = {
    (State.WAITING, State.RUNNING),  # admitted to a row
    (State.RUNNING, State.WAITING),  # preempted
    (State.WAITING, State.FINISHED),  # aborted, timed out
    (State.RUNNING, State.FINISHED),
}


class BlockTable(Protocol):
    """Interface of the table of one request in one group, from its admission until it leaves its row."""

    has_appends: bool  # the workers have the table, too: they get each entry
    block_ids: list[int]
    num_left: int  # first entries that are the null block

    def cache_block(self, block: int, key: bytes, *, is_private: bool = False) -> None:
        """Add a key to the index of the group's pool."""
        ...

    @property
    def held(self) -> Sequence[int]:
        """The blocks that the table references."""
        ...

    def take(self, end: int, blocks: Sequence[int]) -> None:
        """Start the table at boundary `end`, in blocks, with those that are needed there, to which it gets the
        references."""
        ...

    def leave(self, first: int) -> None:
        """Free the blocks that no token from `first` on sees. Call it only before the table grows, and with the first
        token that may be computed again: the step in flight may still read them, any later one may overwrite them."""
        ...

    def is_kept(self, i: int) -> bool:
        """Return whether other requests are likely to need block i: at the next kept boundary after it."""
        ...

    def free(self) -> None:
        """Free all blocks from last to first, so that a prefix is evicted from its end."""
        ...


@dataclass(eq=False)
class Request:
    """One answer. While it waits, `tokens[:num_tokens]` are the prompt and the outputs so far. While it runs, `tokens`
    is its row of the token table, Rows counts its tokens, and `num_tokens` stays as at its admission."""

    frontend_id: int  # the frontend connection that submitted it
    key: int  # that frontend's number for it
    attempt: int
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: list[int]
    arrival_time: float  # unix seconds, by steady_time: the clock of its deadlines
    priority: int  # 0 for all under fcfs
    sort_key: float  # position in the policy's order: lower runs first
    tokens: Ids
    num_tokens: int
    is_flex: bool = False  # of the flex class: it comes after all others in order, and gives way to each of them
    bad_words: list[bytes] = field(default_factory=list)  # int32: the tokens of each word
    logits_processors: list[int] = field(default_factory=list)
    thought_markers: list[bytes] = field(default_factory=list)  # int32: tokens that start reasoning, and that end it
    constraint_begins: list[ConstraintBegin] = field(default_factory=list)  # as in EngineCoreRequest
    constraint_triggers: frozenset[int] = frozenset()  # as in EngineCoreRequest
    constraint_repeats: bool = False
    pooling: PoolingParams | None = None  # embed the prompt: it ends when all of it is computed
    adapter: AdapterRef | None = None  # None: the base model
    adapter_slot: int = NO_SLOT  # the workers' slot that holds its adapter, while it runs
    media: list[MediaSpan] = field(default_factory=list)  # spans of the prompt, sorted by start
    num_prompt_logprobs: int = ALL_KNOWN  # prompt tokens with delivered logprobs, counting the first, which has none
    cache_root: bytes | None = None  # root of its block keys, shared only with its prompt group
    prompt_group: int = 0  # equal for answers that share a prompt; 0: no group
    caller: str = ""  # key of the client, over HTTP of address and API key; callers share grammar compilers equally
    tenant: Tenant = field(default_factory=Tenant)  # callers with the same API key
    grammar_id: int = 0  # number of its grammar (features/grammar/manager.py); 0: none
    is_masked: bool = False  # its next token needs a mask
    waits_for: set[WaitReason] = field(default_factory=set)  # it is not admitted before this is empty
    state: State = State.WAITING
    row: int = -1
    tables: list[BlockTable] = field(default_factory=list)  # its blocks in each KV group, while it runs
    block_keys: list[bytes] = field(default_factory=list)  # keys of its first blocks, computed when needed
    num_cached_blocks: int = 0  # blocks of its tables that others can find
    num_found_blocks: int = 0  # of its tables, at its first admission
    num_cached_tokens: int = -1  # found in the cache at its first admission, 0 if resumed; -1: never admitted
    num_loaded_tokens: dict[PlaceName, int] = field(default_factory=dict)  # of the cached ones, by place
    has_misses_known: bool = False  # why its prompt was not found in the cache was found out, or nothing was missed
    num_preemptions: int = 0
    num_drafts: int = 0  # drafts that were verified
    num_accepted_drafts: int = 0
    is_announced: bool = False  # its frontend was told that it has left the queue
    is_looked_up: bool = False  # the tiers were searched for its blocks since it was submitted or last ran
    num_skips: int = 0  # admissions of later requests while it did not fit

    def move(self, state: State) -> None:
        """Change state; an illegal move raises and changes nothing."""
        if (self.state, state) not in LEGAL_MOVES:
            raise AssertionError(f"request {self.key}: {self.state.name} → {state.name} is not a legal move")
        self.state = state

    @property
    def level(self) -> tuple[bool, int]:
        """Class and priority: requests of one level differ only in their arrival and their tenant."""
        return self.is_flex, self.priority

    @cached_property
    def begin_ids(self) -> frozenset[int]:
        """The tokens behind which a constrained part of it may begin, or with which one may."""
        return self.constraint_triggers.union(begin.last_id for begin in self.constraint_begins)

    def note_prompt_logprobs(self, num_known: int) -> None:
        """Record that logprobs of the first `num_known` prompt tokens were delivered; the first token has none."""
        self.num_prompt_logprobs = max(num_known, 1) if num_known < self.num_prompt_tokens else ALL_KNOWN

    @property
    def num_blocks(self) -> int:
        """Length of its block tables."""
        return len(self.tables[0].block_ids) if self.tables else 0

    @property
    def token_limit(self) -> int:
        """Largest number of tokens, prompt included."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens
