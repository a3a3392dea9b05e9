"""After the end of a frontend at any commit a batch gives the files of a calm run, and computes no token twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.listening.journal.record import MAX_LOSSES
from tokenloom.frontend.server.api.continuation import SHOWN, TOKENS, Shown, current
from tokenloom.frontend.server.bodies import batch_file
from tokenloom.frontend.server.bodies.batch_file import check_batch
from tokenloom.frontend.server.http.batches.clerk import BatchClerk
from tokenloom.frontend.server.http.batches.runner import BatchRunner, RunnerLimits
from tokenloom.frontend.server.metrics.batch_metrics import BatchMetrics
from tokenloom.frontend.state.batches.record import BatchRecord
from tokenloom.frontend.state.batches.store import Batches
from tokenloom.frontend.state.schema import TABLES
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import Overloaded
from tokenloom.ipc.messages.intake import BatchChecked, CheckBatch
from tokenloom.tests.frontend.state.batches.test_record import new_record

T = TypeVar("T")
OWNER = b"owner"
NUM_TOKENS = 6
DEADLINE_S = 20.0
LIMITS = RunnerLimits(max_open=4, save_s=0.0, gather_s=0.0, retry_s=0.01)


class Killed(BaseException):
    """The frontend has ended."""


class Disk:
    """Database and files, which outlive a frontend. It ends at the `kill_at`th commit: before it, or after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.executescript(TABLES)
        self.num_commits, self.kill_at, self.is_after = 0, -1, False
        self.is_killed = asyncio.Event()
        self.failures: list[Exception] = []  # of the next commits

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._check()
        return work(self.connection)

    async def do(
        self, work: Callable[[sqlite3.Connection], T], *, synced: bool = False, is_deleting: bool = False
    ) -> T:
        self._check()
        if self.failures:
            raise self.failures.pop()
        self._end_at(is_after=False)
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            result = work(self.connection)
        self._end_at(is_after=True)
        self.num_commits += 1
        await asyncio.sleep(0)
        return result

    def _end_at(self, *, is_after: bool) -> None:
        if self.num_commits == self.kill_at and self.is_after == is_after:
            self.num_commits += 1
            self.is_killed.set()
            raise Killed

    def _check(self) -> None:
        if self.is_killed.is_set():
            raise Killed

    # ── files ──

    async def input_path(self, owner: bytes, file_id: str) -> Path | None:
        path = self.folder / file_id
        return path if path.exists() else None

    async def create_output(self, owner: bytes, file_id: str, name: str, expires_s: int | None) -> Writer:
        return Writer(self, file_id)

    def output(self, file_id: str | None) -> list[dict[str, Any]]:
        return (
            [] if file_id is None else [json.loads(line) for line in (self.folder / file_id).read_text().splitlines()]
        )


class Writer:
    def __init__(self, disk: Disk, file_id: str) -> None:
        self._disk, self._file_id, self._parts = disk, file_id, list[bytes]()

    async def write(self, data: bytes) -> None:
        self._parts.append(data)

    async def finish(self) -> None:
        def work(_: sqlite3.Connection) -> None:
            (self._disk.folder / self._file_id).write_bytes(b"".join(self._parts))

        await self._disk.do(work, synced=True)

    def discard(self) -> None: ...


class App:
    """App with answers that depend on body, seed and nonce alone, and begin with the tokens that the client has."""

    def __init__(self, statuses: dict[str, list[int]] | None = None) -> None:
        self.computed: Counter[str] = Counter()  # tokens by prompt
        self.statuses = statuses or {}  # of the next answers to a prompt
        self.most_open = self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._answer(json.loads((await receive())["body"])["prompt"], send)
        finally:
            self.num_open -= 1

    async def _answer(self, prompt: str, send: Send) -> None:
        state = current()
        assert state.is_flex and state.is_kept and state.num_losses <= MAX_LOSSES
        status = self.statuses[prompt].pop(0) if self.statuses.get(prompt) else 200
        token_ids = list(state.answers[0].token_ids) if state.answers else []
        while status == 200 and len(token_ids) < NUM_TOKENS:
            await asyncio.sleep(0)
            drawn = hashlib.sha256(f"{prompt} {state.seed} {len(token_ids)}".encode()).digest()
            token_ids.append(drawn[0])
            self.computed[prompt] += 1
            await send({"type": TOKENS, SHOWN: Shown([(0, encode_ids([drawn[0]]))], [], 0, 0, state.seed)})
        headers = [
            (b"content-type", b"application/json"),
            (b"retry-after", b"0"),
            (b"x-request-id", state.nonce[:4].hex().encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        usage = {"prompt_tokens": 2, "completion_tokens": NUM_TOKENS, "total_tokens": 2 + NUM_TOKENS}
        body = {"model": "m", "id": state.digits("id"), "tokens": token_ids, "usage": usage}
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def check(question: CheckBatch) -> BatchChecked:
    return check_batch(question)


def new_runner(disk: Disk, clock: Callable[[], float] = lambda: 1000.0, limits: RunnerLimits = LIMITS) -> BatchRunner:
    batches = Batches(disk, lambda: 1000.0)
    clerk = BatchClerk(batches, disk, check, max_line_bytes=1 << 20)
    return BatchRunner(batches, disk, clerk, limits, "m", BatchMetrics(), lambda: False, clock)


async def serve(disk: Disk, app: App, until: Callable[[], bool], runner: BatchRunner | None = None) -> None:
    """Let a frontend run until it is killed or `until` is true."""
    runner = runner or new_runner(disk)
    task = asyncio.ensure_future(runner.run(app))
    async with asyncio.timeout(DEADLINE_S):
        while not (disk.is_killed.is_set() or until()):
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def stored(disk: Disk) -> BatchRecord:
    import msgspec

    [(record,)] = disk.connection.execute("SELECT record FROM batches").fetchall()
    return msgspec.msgpack.decode(record, type=BatchRecord)


def write_input(folder: Path, count: int) -> None:
    lines = [
        {"custom_id": f"id {i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}
        for i in range(count)
    ]
    (folder / "file-1").write_text("".join(json.dumps(line) + "\n" for line in lines))


def is_over(disk: Disk) -> bool:
    return not stored(disk).is_open


async def new_batch(folder: Path, count: int) -> Disk:
    folder.mkdir(exist_ok=True)
    write_input(folder, count)
    disk = Disk(folder)
    await Batches(disk).add(OWNER, new_record())
    disk.num_commits = 0
    return disk


def stored_tokens(disk: Disk) -> dict[str, int]:
    """Return how many tokens of each prompt are stored in open lines."""
    rows = disk.connection.execute("SELECT number, length(tokens) FROM lines WHERE state = 1")
    return {f"p{number - 1}": num_bytes // 4 for number, num_bytes in rows}


def open_and_waiting(disk: Disk) -> set[str]:
    return {f"p{number - 1}" for (number,) in disk.connection.execute("SELECT number FROM lines WHERE state < 2")}


async def calm_run(folder: Path, count: int) -> tuple[Disk, App]:
    disk, app = await new_batch(folder, count), App({"p2": [400]})
    await serve(disk, app, lambda: is_over(disk))
    return disk, app


async def kill_once(folder: Path, count: int, kill_at: int, *, is_after: bool) -> tuple[Disk, App]:
    """Run a batch and kill the frontend once; return the disk, and the app of the successor."""
    disk = await new_batch(folder, count)
    disk.kill_at, disk.is_after = kill_at, is_after
    await serve(disk, App({"p2": [400]}), lambda: is_over(disk))
    disk.is_killed.clear()
    left, tokens = open_and_waiting(disk), stored_tokens(disk)
    is_known = disk.connection.execute("SELECT COUNT(*) FROM lines").fetchone()[0] == count
    successor = App({"p2": [400]})
    await serve(disk, successor, lambda: is_over(disk))
    if is_known:
        wanted = {prompt: NUM_TOKENS - tokens.get(prompt, 0) for prompt in left if prompt != "p2"}
        assert successor.computed == Counter({prompt: each for prompt, each in wanted.items() if each})
    return disk, successor


def test_a_frontend_that_ends_at_any_commit_changes_no_byte(tmp_path: Path) -> None:
    count = 9
    disk, app = asyncio.run(calm_run(tmp_path / "calm", count))
    calm, num_commits = stored(disk), disk.num_commits
    assert calm.batch.status == "completed" and app.most_open <= LIMITS.max_open
    counts, usage = calm.batch.request_counts, calm.batch.usage
    assert (counts.total, counts.completed, counts.failed) == (count, count - 1, 1)
    assert usage.output_tokens == NUM_TOKENS * (count - 1) and calm.batch.model == "m"
    lines = disk.output(calm.batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"id {i}" for i in range(count) if i != 2]
    assert [line["custom_id"] for line in disk.output(calm.batch.error_file_id)] == ["id 2"]
    cases = [(kill_at, is_after) for kill_at in range(num_commits) for is_after in (False, True)]
    assert len(cases) > 20
    for place, (kill_at, is_after) in enumerate(cases):
        killed, _ = asyncio.run(kill_once(tmp_path / str(place), count, kill_at, is_after=is_after))
        record = stored(killed)
        assert (record.batch.request_counts, record.batch.usage) == (counts, usage), (kill_at, is_after)
        for name in ("output_file_id", "error_file_id"):
            wanted, found = getattr(calm.batch, name), getattr(record.batch, name)
            assert found == wanted
            before, after = (disk.folder / wanted).read_bytes(), (killed.folder / found).read_bytes()
            assert before == after, (kill_at, is_after, name)


def test_a_request_without_room_is_sent_again_and_another_error_is_its_answer(tmp_path: Path) -> None:
    async def work() -> None:
        disk = await new_batch(tmp_path, 3)
        app = App({"p0": [503, 503], "p1": [500]})
        await serve(disk, app, lambda: is_over(disk))
        batch = stored(disk).batch
        assert [line["custom_id"] for line in disk.output(batch.output_file_id)] == ["id 0", "id 2"]
        [error] = disk.output(batch.error_file_id)
        assert error["response"]["status_code"] == 500 and error["error"] is None
        assert app.computed["p0"] == NUM_TOKENS

    asyncio.run(work())


def test_a_database_that_fails_stops_nothing_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        disk = await new_batch(tmp_path, 6)
        disk.failures = [Overloaded("the disk is full"), ValueError("a bug"), Overloaded("the disk is full")]
        await serve(disk, App(), lambda: is_over(disk))
        batch = stored(disk).batch
        assert batch.request_counts.completed == 6 and len(disk.output(batch.output_file_id)) == 6

    asyncio.run(work())


def test_cancelling_keeps_what_has_ended_and_aborts_the_rest(tmp_path: Path) -> None:
    async def work() -> None:
        disk = await new_batch(tmp_path, 40)
        batches, app, runner = Batches(disk), App(), new_runner(disk)
        task = asyncio.ensure_future(serve(disk, app, lambda: is_over(disk), runner))
        async with asyncio.timeout(DEADLINE_S):
            while stored(disk).batch.request_counts.completed < 5:
                await asyncio.sleep(0)
        await batches.cancel(OWNER, "batch_1")
        runner.wake()
        await task
        batch = stored(disk).batch
        assert batch.status == "cancelled" and app.num_open == 0
        done, undone = disk.output(batch.output_file_id), disk.output(batch.error_file_id)
        assert len(done) == batch.request_counts.completed >= 5 and len(done) + len(undone) == 40
        assert {line["error"]["code"] for line in undone} == {"batch_cancelled"}

    asyncio.run(work())


def test_the_lines_left_when_a_window_ends_get_errors(tmp_path: Path) -> None:
    async def work() -> None:
        disk = await new_batch(tmp_path, 40)
        end = stored(disk).expires_at

        def clock() -> float:
            return end - 1 if stored(disk).batch.request_counts.completed < 5 else end + 1

        await serve(disk, App(), lambda: is_over(disk), new_runner(disk, clock))
        batch = stored(disk).batch
        assert batch.status == "expired" and batch.request_counts.completed >= 5
        undone = disk.output(batch.error_file_id)
        assert len(undone) == batch.request_counts.failed > 20
        assert {line["error"]["code"] for line in undone} == {"batch_expired"}

    asyncio.run(work())


@pytest.mark.parametrize("served", ["m", "another"])
def test_lines_without_a_model_are_not_run_by_another_model(served: str, tmp_path: Path) -> None:
    async def work() -> None:
        disk = await new_batch(tmp_path, 2)
        batches = Batches(disk, lambda: 1000.0)
        clerk = BatchClerk(batches, disk, check, max_line_bytes=1 << 20)
        runner = BatchRunner(batches, disk, clerk, LIMITS, served, BatchMetrics(), lambda: False, lambda: 1000.0)
        await serve(disk, App(), lambda: is_over(disk), runner)
        batch = stored(disk).batch
        assert batch.request_counts.completed == (2 if served == "m" else 0)
        for line in disk.output(batch.error_file_id):
            assert line["response"]["status_code"] == 404 and "another" in line["response"]["body"]["error"]["message"]

    asyncio.run(work())


def test_a_key_waits_neither_for_the_files_nor_for_the_failures_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_file, "PIECE_BYTES", 1)  # each line is a piece

    async def work() -> None:
        disk = await new_batch(tmp_path, 30)
        batches, asked, changed_at = Batches(disk), list[str](), list[int]()
        for name in ("file-2", "file-3"):
            (tmp_path / name).write_bytes((tmp_path / "file-1").read_bytes().split(b"\n")[0])

        async def check(question: CheckBatch) -> BatchChecked:
            asked.append(Path(question.path).name)
            if len(asked) == 3:
                await batches.add(b"second", new_record("batch_2", input_file_id="file-2"))
                await batches.add(b"third", new_record("batch_3", input_file_id="file-3"))
            if asked[-1] == "file-3":
                raise Overloaded("all intake processes are busy")
            return check_batch(question)

        clerk = BatchClerk(batches, disk, check, max_line_bytes=1 << 20)
        with pytest.raises(Overloaded):
            await clerk.work(lambda: changed_at.append(len(asked)))
        assert Counter(asked) == {"file-1": 31, "file-2": 2, "file-3": 1}
        assert changed_at == [8, 34], "the second key's file, between pieces of the first one's"
        statuses = [each.record.batch.status for each in await batches.open_batches()]
        assert statuses == ["in_progress", "in_progress", "validating"]

    asyncio.run(work())


def test_a_line_that_ends_every_frontend_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        disk = await new_batch(tmp_path, 2)
        batches = Batches(disk)
        await BatchClerk(batches, disk, check, max_line_bytes=1 << 20).work()
        await batches.open_lines(2, 1000)
        for _ in range(MAX_LOSSES):
            assert len(await batches.take_over()) == 2
        await serve(disk, App(), lambda: is_over(disk))
        [error, _] = disk.output(stored(disk).batch.error_file_id)
        assert error["response"]["status_code"] == 500
        assert f"lost {MAX_LOSSES + 1} times" in error["response"]["body"]["error"]["message"]

    asyncio.run(work())


def test_an_input_file_that_is_gone_fails_the_batch_or_its_lines(tmp_path: Path) -> None:
    async def work(is_checked: bool) -> None:
        disk = await new_batch(tmp_path, 2)
        if is_checked:
            await BatchClerk(Batches(disk), disk, check, max_line_bytes=1 << 20).work()
        (tmp_path / "file-1").unlink()
        await serve(disk, App(), lambda: is_over(disk))
        batch = stored(disk).batch
        if is_checked:
            assert batch.status == "completed" and batch.request_counts.failed == 2
        else:
            assert batch.errors is not None and batch.errors.data[0].code == "file_not_found"

    for is_checked in (False, True):
        asyncio.run(work(is_checked))


def test_a_runner_that_drains_stores_the_tokens_and_leaves_the_lines_open(tmp_path: Path) -> None:
    async def work() -> None:
        disk, app = await new_batch(tmp_path, 8), App()
        batches = Batches(disk, lambda: 1000.0)
        clerk = BatchClerk(batches, disk, check, max_line_bytes=1 << 20)
        runner = BatchRunner(
            batches, disk, clerk, LIMITS, "m", BatchMetrics(), lambda: sum(app.computed.values()) >= 8, lambda: 1000.0
        )
        async with asyncio.timeout(DEADLINE_S):
            await runner.run(app)
        await asyncio.sleep(0)
        assert app.num_open == 0 and sum(stored_tokens(disk).values()) > 0
        left, tokens = open_and_waiting(disk), stored_tokens(disk)
        successor = App()
        await serve(disk, successor, lambda: is_over(disk))
        wanted = {prompt: NUM_TOKENS - tokens.get(prompt, 0) for prompt in left}
        assert successor.computed == Counter({prompt: each for prompt, each in wanted.items() if each})

    asyncio.run(work())
