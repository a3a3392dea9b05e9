"""FleetSimulation: requests, a router, replicas and faults in virtual time.

One heap of events. The router is the engine's own class and gets only the notices of a frontend: those of its answers,
and that a replica is gone. A request on a lost replica is routed again with its tokens, as fast as the engine's
ResumePacer lets it. The results are the jobs.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence

from tokenloom.frontend.server.replicas.resume_pacer import ResumePacer
from tokenloom.frontend.server.replicas.resume_queue import ResumeQueue
from tokenloom.frontend.server.replicas.router import Router
from tokenloom.scripts.fleet.faults import Fault, Kill, Partition, Poison, RollingRestart, Slow
from tokenloom.scripts.fleet.replica import NEVER, Event, Replica
from tokenloom.scripts.fleet.traces import Job

MAX_LOSSES = 3  # a request that was computed by as many lost replicas, without a token in between, ends with an error


class FleetSimulation:
    """Owner of the replicas by core number, the open jobs and the clock."""

    def __init__(
        self,
        jobs: Iterable[Job],
        num_replicas: int,
        new_replica: Callable[[], Replica],
        router: Router,
        *,
        faults: Sequence[Fault] = (),
        capacity_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.jobs: list[Job] = []
        self.num_recomputed_tokens = 0
        self.num_lost_tokens = 0  # of the contexts on lost replicas
        self._arrivals = iter(jobs)
        self._router, self._new_replica, self._capacity = router, new_replica, capacity_tokens
        self._replicas: dict[int, Replica] = {}
        self._open: dict[int, Job] = {}
        self._cut_off: set[int] = set()  # cores whose notices do not arrive
        self._resumes = ResumeQueue[Job](lambda job: job.finished_at < 0)
        self._pacer = ResumePacer(router)
        self._random = random.Random(seed)
        self._has_poison = False
        self._poison_at: list[float] = sorted(fault.at_s for fault in faults if isinstance(fault, Poison))
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._tie = itertools.count()
        for core in range(num_replicas):
            self._bring_up(core)
        for fault in faults:
            self._at(fault.at_s, self._strike, fault)

    def run(self) -> None:
        """Simulate until no event is left."""
        self._next_arrival()
        while self._heap:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)

    @property
    def num_unfinished(self) -> int:
        return sum(job.finished_at < 0 for job in self.jobs)

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (time, next(self._tie), action, arguments))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _next_arrival(self) -> None:
        if (job := next(self._arrivals, None)) is not None:
            self._at(job.arrived_at, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        self.jobs.append(job)
        if self._poison_at and job.arrived_at >= self._poison_at[0]:
            self._poison_at.pop(0)
            job.is_poison = self._has_poison = True
        self._submit(job)
        self._next_arrival()

    def _submit(self, job: Job) -> None:
        core = self._router.pick(job.keys, job.num_tokens, self.now)
        if core is None:
            self._resumes.add(job.arrived_at, job)
        else:
            self._send(job, core)

    def _resume_waiting(self) -> None:
        """Send jobs that have lost their core, or found none, as fast as the others get on."""
        while (job := self._resumes.first) is not None:
            core = self._pacer.pick(job.keys, job.num_tokens, job.num_tokens, self.now)
            if core is None:
                break
            self._resumes.pop()
            self._send(job, core)
        if (next_at := self._pacer.end()) < NEVER and self._resumes.first is not None:
            self._at(next_at, self._resume_waiting)

    def _send(self, job: Job, core: int) -> None:
        self._open[job.number] = job
        job.core = core
        self._router.on_sent(job.number, core, job.keys, job.num_tokens, self.now)
        if core not in self._cut_off and (replica := self._replicas.get(core)) is not None:
            before = replica.next_at
            replica.submit(job, self.now)
            self._wake(replica, before, core)

    def _wake(self, replica: Replica, before: float, core: int) -> None:
        if replica.next_at != before:
            self._at(replica.next_at, self._run_replica, replica, core, replica.next_at)

    def _run_replica(self, replica: Replica, core: int, time: float) -> None:
        if replica.next_at != time or time == NEVER or self._replicas.get(core) is not replica:
            return  # it was woken earlier, or is gone
        if self._has_poison and (poisons := [job for job in replica.computing() if job.is_poison]):
            self._kill(core, Kill(at_s=self.now), culprit=poisons[0])
            return
        for event in replica.run(self.now):
            if core not in self._cut_off:
                self._notice(event)
        if replica.next_at < NEVER:
            self._at(replica.next_at, self._run_replica, replica, core, replica.next_at)

    def _notice(self, event: Event) -> None:
        """Take a notice of a replica, as the frontend does."""
        job, router = event.job, self._router
        if event.kind == "started":
            router.on_started(job.number, event.num_cached_tokens)
            if job.num_cached_tokens < 0:
                job.num_cached_tokens = event.num_cached_tokens
            else:
                self.num_recomputed_tokens += job.num_tokens - event.num_cached_tokens
        elif event.kind == "first_token":
            router.on_first_token(job.number, self.now)
            job.num_losses = 0
            job.num_done += 1
            if job.first_token_at < 0:
                job.first_token_at = self.now
            if job.lost_at >= 0:
                job.gap_s, job.lost_at = max(job.gap_s, self.now - job.lost_at), -1.0
        else:
            job.num_done = job.num_output_tokens
            self._end(job)

    def _end(self, job: Job) -> None:
        self._router.on_finished(job.number, job.num_done, self.now)
        del self._open[job.number]
        job.finished_at = self.now

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _strike(self, fault: Fault) -> None:
        if isinstance(fault, RollingRestart):
            for number, core in enumerate(sorted(self._replicas)):
                self._at(self.now + number * fault.every_s, self._drain, core, fault)
        elif not isinstance(fault, Poison):
            for core in self._random.sample(sorted(self._replicas), min(fault.num, len(self._replicas))):
                self._strike_one(fault, core)

    def _strike_one(self, fault: Kill | Slow | Partition, core: int) -> None:
        replica = self._replicas[core]
        if isinstance(fault, Kill):
            self._kill(core, fault)
        elif isinstance(fault, Slow):
            replica.slow_down(fault.factor)
            self._at(self.now + fault.for_s, replica.slow_down, 1.0)
        else:
            self._record_progress(replica)
            self._cut_off.add(core)
            self._at(self.now + fault.lease_s, self._give_up, core, replica)
            self._at(self.now + max(fault.for_s, fault.lease_s), self._heal, core, replica)

    def _record_progress(self, replica: Replica) -> None:
        """Record the tokens of a replica's jobs that were delivered until now, the last that the frontend gets."""
        for job, num_done in replica.progress(self.now).items():
            job.num_done, job.lost_at = num_done, self.now

    def _kill(self, core: int, fault: Kill, culprit: Job | None = None) -> None:
        replica = self._replicas.pop(core)
        self._record_progress(replica)
        is_alone = culprit is not None and culprit.num_losses == MAX_LOSSES - 1  # then nothing else was computed
        for job in replica.computing():
            if job is culprit or not (is_alone or job.num_losses == MAX_LOSSES - 1):
                job.num_losses += 1
        self._at(self.now + fault.noticed_after_s, self._lose, core)
        self._at(self.now + fault.back_after_s, self._bring_up, core)

    def _lose(self, core: int) -> None:
        """Let the frontend go on elsewhere with all answers of a core that it found gone, in the order they came."""
        for number in self._router.lose(core):
            job = self._open.pop(number)
            job.num_resumes += 1
            if job.lost_at < 0:
                job.lost_at = self.now
            if job.num_losses >= MAX_LOSSES:
                job.finished_at = self.now
                continue
            self.num_lost_tokens += job.num_tokens
            self._resumes.add(job.arrived_at, job)
        self._resume_waiting()

    def _bring_up(self, core: int) -> None:
        self._replicas[core] = self._new_replica()
        self._cut_off.discard(core)
        self._return(core)

    def _return(self, core: int) -> None:
        self._router.add(core, self._capacity)
        self._pacer.forget(core)
        self._resume_waiting()

    def _give_up(self, core: int, replica: Replica) -> None:
        """End the leases of a cut connection: the frontend continues elsewhere, and the replica ends its abandoned
        jobs."""
        if self._replicas.get(core) is replica:
            replica.abort_all(self.now)
            self._lose(core)

    def _heal(self, core: int, replica: Replica) -> None:
        self._cut_off.discard(core)
        if self._replicas.get(core) is replica:
            self._return(core)

    def _drain(self, core: int, fault: RollingRestart) -> None:
        if core in self._replicas and core not in self._cut_off:
            self._router.drain(core)
            restart = Kill(at_s=self.now, noticed_after_s=0.0, back_after_s=fault.back_after_s)
            self._at(self.now + fault.drain_s, self._restart, core, restart)

    def _restart(self, core: int, restart: Kill) -> None:
        if core in self._replicas:
            replica = self._replicas.pop(core)
            self._record_progress(replica)
            self._lose(core)
            self._at(self.now + restart.back_after_s, self._bring_up, core)
