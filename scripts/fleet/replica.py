"""Replicas of a simulated fleet: their interface, the cost of a step, and the fluid replica.

The fluid replica follows the rules of the engine's scheduler without its tables: steps with prompts are simulated one
at a time, a run of steps that only decode is one event. Its prefix cache is an LRU of the trace's blocks.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from tokenloom.core.scheduling.prefill_throttle import CROWD, MIN_TOKENS, pause_s
from tokenloom.scripts.fleet.traces import BLOCK, Job

NEVER = math.inf
EventKind: TypeAlias = Literal["started", "first_token", "finished"]


class Event(NamedTuple):
    """A notice of a replica to its frontend. num_cached_tokens: of `started`."""

    kind: EventKind
    job: Job
    num_cached_tokens: int = 0


class StepCost(NamedTuple):
    """Seconds of a step: a fixed part, and for each decoding row, prompt token, token of context (all that the step's
    rows have computed after it) and pair of a prompt token and a token before it."""

    base_s: float
    row_s: float
    prompt_token_s: float
    context_token_s: float
    pair_s: float = 0.0

    def seconds(
        self, num_rows: int, num_prompt_tokens: float, num_context_tokens: float, num_pairs: float = 0.0
    ) -> float:
        rows_s = num_rows * self.row_s + num_context_tokens * self.context_token_s
        return self.base_s + rows_s + num_prompt_tokens * self.prompt_token_s + num_pairs * self.pair_s


LARGE_GPU = StepCost(6e-3, 2e-5, 1 / 12_000, 4e-8)  # of the size of an 8B model in bf16 on one H100


class Sizes(NamedTuple):
    """Limits of a replica, as the engine's options."""

    pool_tokens: int = 500_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


class Replica(Protocol):
    """One engine in virtual time. `next_at`: the time of its next event, at which `run` is called."""

    next_at: float

    def submit(self, job: Job, now: float) -> None: ...

    def run(self, now: float) -> list[Event]: ...

    def progress(self, now: float) -> dict[Job, int]:
        """Return the output tokens of each open job that are delivered now."""

    def computing(self) -> list[Job]:
        """Return the jobs that the step in progress computes."""

    def abort_all(self, now: float) -> None:
        """End all jobs; the prefix cache stays."""

    def slow_down(self, factor: float) -> None:
        """Let every step take `factor` times as long as it would."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A job whose prompt is in the steps, with its progress and its blocks."""

    job: Job
    num_left: int  # tokens in no step yet
    num_computed: int
    keys_held: list[int] = field(default_factory=list)  # blocks that others can find, and it has a reference to
    num_private: int = 0  # blocks of its own, those of its answer included


class BlockCache:
    """The blocks of a replica's pool: referenced ones by key, those of one job alone, and an LRU of the rest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_private = 0

    def num_hits(self, job: Job) -> int:
        """Return how many of the first blocks of a job's prompt are here."""
        for i, key in enumerate(job.keys):
            if key not in self._refs and key not in self._idle:
                return i
        return len(job.keys) - (len(job.keys) * BLOCK >= job.num_tokens)

    def take(self, prompt: _Prompt, num_hits: int, num_reserved: int) -> bool:
        """Give a prompt its blocks, with `num_reserved` left for others; False if they do not fit."""
        job = prompt.job
        num_all = -(-(job.num_prompt_tokens + job.num_output_tokens) // BLOCK)
        held = list(job.keys[:num_hits])
        num_idle = sum(key in self._idle for key in held)
        if num_all - num_hits + num_idle + num_reserved > self.num_blocks - len(self._refs) - self._num_private:
            return False
        for key in held:
            self._idle.pop(key, None)
            self._refs[key] = self._refs.get(key, 0) + 1
        prompt.keys_held, prompt.num_private = held, num_all - num_hits
        self._num_private += prompt.num_private
        self._evict()
        return True

    def publish(self, prompt: _Prompt) -> None:
        """Let others find the blocks of a prompt that are computed."""
        keys, held = prompt.job.keys, prompt.keys_held
        while len(held) < len(keys) and (len(held) + 1) * BLOCK <= prompt.num_computed:
            key = keys[len(held)]
            known = self._refs.get(key)
            if known is None and key not in self._idle:
                prompt.num_private -= 1
                self._num_private -= 1
            self._idle.pop(key, None)
            self._refs[key] = (known or 0) + 1
            held.append(key)

    def free(self, prompt: _Prompt) -> None:
        """Take the blocks back, from the end; they can be found until they are used again."""
        for i in range(prompt.num_private):
            self._idle[-(prompt.job.number << 10 | i) - 1] = None
        self._num_private -= prompt.num_private
        for key in reversed(prompt.keys_held):
            self._refs[key] -= 1
            if not self._refs[key]:
                del self._refs[key]
                self._idle[key] = None
        self._evict()

    def _evict(self) -> None:
        while self._idle and len(self._refs) + len(self._idle) + self._num_private > self.num_blocks:
            self._idle.popitem(last=False)


class FluidReplica:
    """Owner of its queue, prompts, decoding rows and cache."""

    def __init__(self, cost: StepCost, sizes: Sizes) -> None:
        self._cost, self._sizes = cost, sizes
        self._factor = 1.0
        self.cache = BlockCache(max(sizes.pool_tokens // BLOCK, 1))
        self.next_at = NEVER
        self._waiting: deque[Job] = deque()
        self._prompts: list[_Prompt] = []
        self._decodes: list[tuple[int, int, _Prompt]] = []  # heap by the step that ends them
        self._context = 0.0  # tokens that decoding rows read in a step
        self._num_steps = 0
        self._burst_steps = 0
        self._events: list[Event] = []
        self._step: list[tuple[_Prompt, int]] | None = None  # prompt tokens of the step that runs
        self._next_step: list[tuple[_Prompt, int]] | None = None  # of the step behind it, if that is sent
        self._step_s = 0.0
        self._begun_at = 0.0
        self._num_jumped = 1  # steps until next_at

    def submit(self, job: Job, now: float) -> None:
        self._waiting.append(job)
        if self._step is None:
            self._begin(now)
        elif self._num_jumped > 1:  # the job waits for the end of the step that runs, and for the one behind it
            done = min(max(math.ceil((now - self._begun_at) / self._step_s), 1), self._num_jumped)
            self._num_jumped, self.next_at = done, self._begun_at + done * self._step_s

    def run(self, now: float) -> list[Event]:
        """End the step, or the run of steps, that ends now; begin the next."""
        assert self._step is not None
        self._num_steps += self._num_jumped
        self._context += self._num_jumped * len(self._decodes)
        while self._decodes and self._decodes[0][0] <= self._num_steps:
            self._finish(heapq.heappop(self._decodes)[2])
        for prompt, count in self._step:
            prompt.num_computed += count
            if prompt.num_computed >= prompt.job.num_tokens:
                self._start_decode(prompt)
        self._step = None
        self._begin(now)
        events, self._events = self._events, []
        return events

    def _begin(self, now: float) -> None:
        """Begin the step that was sent before, or a new one, and send another behind it."""
        step, self._next_step = self._next_step, None
        num_rows = len(self._decodes)
        if step is None or not (step or num_rows):
            step = self._plan()
        if not step and not num_rows:
            self.next_at = NEVER
            return
        self._step, self._begun_at, self._num_jumped = step, now, 1
        self._next_step = self._plan()
        num_tokens = sum(count for _, count in step)
        if not step and not self._next_step:
            self._num_jumped = self._decodes[0][0] - self._num_steps
        context = self._context + num_rows * (self._num_jumped + 1) / 2
        context += sum(prompt.num_computed + count for prompt, count in step)
        num_pairs = sum(count * (prompt.num_computed + count / 2) for prompt, count in step)
        self._step_s = self._factor * self._cost.seconds(num_rows, num_tokens, context, num_pairs)
        self.next_at = now + self._num_jumped * self._step_s

    def _plan(self) -> list[tuple[_Prompt, int]]:
        """Choose the prompt tokens of a step, and admit jobs to it."""
        prompts = [prompt for prompt in self._prompts if prompt.num_left]
        num_rows, num_prompts = len(self._decodes), len(prompts) + len(self._waiting)
        budget = self._limit(num_rows, num_prompts, self._sizes.max_num_batched_tokens - num_rows)
        is_alone = len(self._prompts) + num_rows + len(self._waiting) <= 1
        most = self._sizes.max_num_batched_tokens // (1 if is_alone else 4)
        step: list[tuple[_Prompt, int]] = []
        for prompt in prompts:
            budget -= self._add(step, prompt, min(most, budget))
        while budget > 0 and self._waiting and (admitted := self._admit(self._waiting[0])) is not None:
            self._waiting.popleft()
            budget -= self._add(step, admitted, min(most, budget))
        return step

    def _add(self, step: list[tuple[_Prompt, int]], prompt: _Prompt, most: int) -> int:
        count = min(most, prompt.num_left)
        if count > 0:
            prompt.num_left -= count
            step.append((prompt, count))
        return max(count, 0)

    def _limit(self, num_rows: int, num_prompts: int, budget: int) -> int:
        """Return the tokens that prompts may take beside decoding rows, as PrefillThrottle does with known costs."""
        if num_rows <= CROWD * num_prompts:
            self._burst_steps += 1
            return budget
        is_tail = num_prompts > 0 and self._burst_steps > 0
        self._burst_steps = self._burst_steps - 1 if is_tail else 0
        if is_tail:
            return budget
        decodes_s = self._cost.seconds(num_rows, 0, self._context)
        tokens = int(pause_s(decodes_s, num_prompts) / self._cost.prompt_token_s)
        return min(budget, max(tokens, MIN_TOKENS))

    def _admit(self, job: Job) -> _Prompt | None:
        num_active = len(self._prompts) + len(self._decodes)
        if num_active >= self._sizes.max_num_seqs:
            return None
        for prompt in self._prompts:
            self.cache.publish(prompt)
        num_hits = self.cache.num_hits(job)
        prompt = _Prompt(job, job.num_tokens - num_hits * BLOCK, num_hits * BLOCK)
        if not self.cache.take(prompt, num_hits, num_active):
            return None
        self._prompts.append(prompt)
        self._events.append(Event("started", job, num_hits * BLOCK))
        return prompt

    def _start_decode(self, prompt: _Prompt) -> None:
        self.cache.publish(prompt)
        self._prompts.remove(prompt)
        job = prompt.job
        self._events.append(Event("first_token", job))
        num_left = job.num_output_tokens - job.num_done - 1
        if num_left <= 0:
            self._finish(prompt, is_counted=False)
        else:
            self._context += job.num_tokens + 1
            heapq.heappush(self._decodes, (self._num_steps + num_left, job.number, prompt))

    def _finish(self, prompt: _Prompt, *, is_counted: bool = True) -> None:
        if is_counted:
            self._context -= prompt.job.num_prompt_tokens + prompt.job.num_output_tokens
        self.cache.free(prompt)
        self._events.append(Event("finished", prompt.job))

    def progress(self, now: float) -> dict[Job, int]:
        num_steps = self._num_steps
        if self._step is not None and self._num_jumped > 1:
            num_steps += int((now - self._begun_at) / self._step_s)
        found = {job: job.num_done for job in self._waiting} | {p.job: p.job.num_done for p in self._prompts}
        return found | {
            prompt.job: prompt.job.num_output_tokens - (end - num_steps) for end, _, prompt in self._decodes
        }

    def computing(self) -> list[Job]:
        return [prompt.job for prompt, _ in self._step or ()] + [prompt.job for _, _, prompt in self._decodes]

    def abort_all(self, now: float) -> None:
        for prompt in [*self._prompts, *(prompt for _, _, prompt in self._decodes)]:
            self.cache.free(prompt)
        self._waiting.clear()
        self._prompts.clear()
        self._decodes.clear()
        self._next_step = self._step = None
        self._context, self.next_at = 0.0, NEVER
        self._events.clear()

    def slow_down(self, factor: float) -> None:
        self._factor = factor
