"""However a request ends while it is opened, at whatever it waits for, nothing leaks and nothing is answered twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tokenloom.frontend.server.helpers.task import Then, reply_of
from tokenloom.frontend.server.prompts.prompt import Prompt
from tokenloom.frontend.server.prompts.prompt_reader import SHORT_CHARACTERS
from tokenloom.frontend.server.requests.media.media_job import MediaJob
from tokenloom.ipc.codec import encode
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.adapter import AdapterRef
from tokenloom.ipc.messages.client import Abort, Medium, Submit
from tokenloom.ipc.messages.core import EngineCoreRequest, Finished
from tokenloom.tests.frontend.bench import Bench, ids, new_submit
from tokenloom.tests.frontend.server.requests.fake_media import MARKER, FakeMedium, fake_media, seeing_spec

NAMES = ("a", "b", "c")  # of clients, and of the one request that each has at a time
STAGES = ("adapter", "media", "prompt")
EVENTS = ("result", "error", "abort", "replacement", "loss of the client")
ADAPTER = AdapterRef(digest=bytes(32), folder="", rank=1)
LONG = "a " * SHORT_CHARACTERS
(PLACEHOLDER,) = ids(MARKER)


@dataclass(eq=False)
class Job:
    """What a request waits for. A cancelled one may call back nevertheless."""

    stage: str
    name: str
    then: Then[Any]
    result: Callable[[], object]


class Jobs:
    """Stands in for adapters, media and the thread pool. Jobs end when the test says so."""

    def __init__(self) -> None:
        self.open: list[Job] = []
        self.cancelled: list[Job] = []
        self.num_adapters = 0
        self.media: list[MediaJob[Any]] = []  # not released

    def _start(self, stage: str, name: str, then: Then[Any], result: Callable[[], object]) -> Job:
        self.open.append(Job(stage, name, then, result))
        return self.open[-1]

    def cancel(self, job: Job | None) -> None:
        if job in self.open:
            self.open.remove(job)
            self.cancelled.append(job)

    def of(self, name: str) -> Job | None:
        return next((job for job in self.open if job.name == name), None)

    async def resolve(self, submit: Submit) -> AdapterRef:
        await reply_of(lambda then: self._start("adapter", submit.request_id, then, lambda: None), self.cancel)
        self.num_adapters += 1
        return ADAPTER

    def read(self, media: list[Medium], *, owner: str, **_: object) -> MediaJob[Any]:
        job: MediaJob[Any] = MediaJob("user", media, owner, "", None)
        self.media.append(job)
        self._start("media", bytes.fromhex(owner).decode(), job.reply.bring, lambda: [FakeMedium(bytes(32), (1, 1, 2))])
        return job

    def run(self, work: Callable[[None], Prompt], then: Then[Any], *, owner: str, **_: object) -> Job:
        def first_tokens() -> Prompt:
            return Prompt(work(None).token_ids[:64], None)

        return self._start("prompt", bytes.fromhex(owner).decode(), then, first_tokens)

    def release(self, held: AdapterRef | MediaJob[Any]) -> None:
        if isinstance(held, AdapterRef):
            self.num_adapters -= 1
            return
        self.media.remove(held)
        self.cancel(next((job for job in self.open if job.then == held.reply.bring), None))


class Walk:
    """A frontend with a client for each name, of which at most one request is open, and the test as all that it waits
    for. `num_ends` counts the ends that each client is to read of."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seen: set[tuple[str, str]] = set()  # stages and the events that have ended them
        self.num_ends: Counter[str] = Counter()
        self.jobs = Jobs()
        media, _ = fake_media(PLACEHOLDER)
        self.bench = Bench(media=media, seeing=seeing_spec(folder, PLACEHOLDER))
        reader: Any = self.bench.frontend.reader
        reader._adapters = reader._media = reader._prompts._pool = self.jobs
        for name in NAMES:
            self.bench.hello(name.encode())

    def requests(self) -> list[Any]:
        return [each for session in self.bench.frontend._sessions for each in session.request_by_id.values()]

    def submit(self, name: str, attempt: int) -> None:
        media = [Medium(digest=bytes(32))] * self.draw.randrange(2)
        prompt = MARKER * len(media) + self.draw.choice(["short", LONG])
        adapter = self.draw.choice(["", "sql"])
        self.say(name, new_submit(name, prompt=prompt, media=media, adapter=adapter, attempt=attempt))

    def say(self, name: str, message: Abort | Submit) -> None:
        self.bench.frontend.on_client_frame(name.encode(), encode(message))

    def step(self) -> None:
        """Submit a request, or let something happen to one that is open; let a cancelled job call back."""
        name = self.draw.choice(NAMES)
        request = next((each for each in self.requests() if each.request_id == name), None)
        job, event = self.jobs.of(name), self.draw.choice(EVENTS)
        if request is None:
            self.submit(name, 0)
        elif event in ("result", "error"):
            self.end(name, request, job, has_result=event == "result")
        else:
            self.seen.add(("core" if job is None else job.stage, event))
            if event == "abort":
                self.num_ends[name] += 1
                self.say(name, Abort(request_id=name))
            elif event == "replacement":
                self.submit(name, request.submit.attempt + 1)
            else:
                self.bench.frontend.on_client_lost(name.encode(), "gone", "the test says so")
                self.bench.hello(name.encode())
        if self.jobs.cancelled and self.draw.random() < 0.3:
            late = self.jobs.cancelled.pop(self.draw.randrange(len(self.jobs.cancelled)))
            late.then(self.draw.choice([late.result(), RequestError("late")]))
        self.check()

    def end(self, name: str, request: Any, job: Job | None, *, has_result: bool) -> None:
        """End the job of a request with a result or an error; without a job end the request at the core."""
        if job is None:
            self.num_ends[name] += 1
            (answer,) = request.answers
            self.bench.core(finished=[Finished(key=answer.key, reason="length")])
            return
        self.jobs.open.remove(job)
        if has_result:
            job.then(job.result())
        else:
            self.seen.add((job.stage, "error"))
            self.num_ends[name] += 1
            job.then(RequestError("no"))

    def check(self) -> None:
        """Each request waits for one job or is at the core, and holds what it has got; each end is reported once."""
        self.bench.turn()
        requests = self.requests()
        opening = [each for each in requests if each.processed is None]
        assert sorted(each.request_id for each in opening) == sorted(job.name for job in self.jobs.open)
        assert sum(each.adapter is not None for each in requests) == self.jobs.num_adapters
        begun = [job.name for job in self.jobs.open if job.stage == "adapter"]
        assert sum(bool(each.submit.media) and each.request_id not in begun for each in requests) == len(
            self.jobs.media
        )
        at_core = {answer.key for each in requests for answer in each.answers}
        assert self.bench.frontend._outputs.answer_by_key.keys() == at_core
        submitted = [each for each in self.bench.to_core if isinstance(each, EngineCoreRequest)]
        keys = [child.key for each in submitted for child in each.children]
        assert len(set(keys)) == len(keys) and at_core <= set(keys)
        news = [delta for name in NAMES for delta in self.bench.deltas(name.encode())]
        assert Counter(delta.request_id for delta in news if delta.finish_reason is not None) == self.num_ends
        self.num_ends.clear()


def test_nothing_leaks_and_nothing_is_answered_twice_however_requests_end(tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()
    for seed in range(6):
        walk = Walk(tmp_path / str(seed), seed)
        for _ in range(200):
            walk.step()
        for name in NAMES:
            walk.bench.frontend.on_client_lost(name.encode(), "gone", "the walk ends")
        walk.check()
        assert not walk.requests(), "so that nothing is held"
        seen |= walk.seen
    assert seen >= set(product(STAGES, EVENTS[1:]))
