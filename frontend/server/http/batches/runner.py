"""BatchRunner: runs the lines of open batches, oldest batch first, as requests of the flex class.

Frontend 0 of an engine has it; the others write rows and wake it. A line is OPEN in the database before its request is
sent, and has ended there once its answer is stored. Lines that an earlier frontend has left open go on with the tokens
that it has stored. While the state folder cannot be written, no line is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from starlette.types import ASGIApp

from .....ipc.errors import TokenloomError
from .....ipc.process.log import is_worth_a_line
from ....state.batches.lines import LineTokens, OpenLine
from ....state.batches.store import Batches, LineOutcome, StoredBatch
from ...metrics.batch_metrics import BatchMetrics
from .clerk import BatchClerk, BatchFiles
from .line_run import LineRun

T = TypeVar("T")

logger = logging.getLogger("tokenloom.http")

OPEN_BYTES = 64 << 20  # of the bodies of all open lines, beyond the last one


class RunnerLimits(NamedTuple):
    """Bounds of the lines that run at once, and times."""

    max_open: int  # lines; more than the rows of the engine, so that no row waits for a line
    max_bytes: int = OPEN_BYTES
    # between two commits of the tokens of open lines: a kill loses at most these, and 512 lines take 3 ms of CPU
    save_s: float = 0.25
    gather_s: float = 0.05  # between the end of a line and its commit, which other lines share
    retry_s: float = 5.0  # after the database has failed


class BatchRunner:
    """Runner of all open lines, and owner of their tasks. `wake` may be called before `run`.

    Invariant: a line has at most one task, and at most `max_open` lines have one."""

    def __init__(
        self,
        batches: Batches,
        files: BatchFiles,
        clerk: BatchClerk,
        limits: RunnerLimits,
        served_model: str,
        metrics: BatchMetrics,
        is_draining: Callable[[], bool],
        now: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: by the clock of the state, which windows are measured by."""
        self._batches, self._files, self._clerk, self._limits = batches, files, clerk, limits
        self._metrics = metrics
        self._served_model, self._is_draining, self._now, self._monotonic = served_model, is_draining, now, monotonic
        self._runs: dict[tuple[int, int], tuple[LineRun, asyncio.Task[None]]] = {}  # by batch and line number
        self._outcomes: list[LineOutcome] = []  # not stored yet
        self._tokens: list[LineTokens] = []  # not stored yet
        self._changed, self._has_paperwork = asyncio.Event(), asyncio.Event()
        self._must_look = True  # at the batches: one may have changed
        self._next_expiry: float | None = None
        self._save_at = 0.0  # the next time to store tokens

    def wake(self) -> None:
        """Look at the batches soon: one is new, or is to be cancelled."""
        self._must_look = True
        self._changed.set()

    async def run(self, app: ASGIApp) -> None:
        """Run lines until the engine drains or the task is cancelled."""
        paperwork = asyncio.ensure_future(self._do_paperwork())
        try:
            left = await self._persist(self._batches.take_over)
            await self._persist(lambda: self._start(app, left))
            while not self._is_draining():
                await self._persist(lambda: self._turn(app))
                await self._wait()
            self._stop_runs(list(self._runs))
            await self._save(has_tokens=True)
        finally:
            self._stop_runs(list(self._runs))
            paperwork.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await paperwork

    async def _persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`; try again as long as the database fails."""
        num_failures = 0
        while True:
            try:
                return await work()
            except TokenloomError as error:
                num_failures += 1
                if is_worth_a_line(num_failures):
                    logger.warning("batches pause, and are tried again every %g s: %s", self._limits.retry_s, error)
            except Exception:
                logger.exception("batches pause for %g s", self._limits.retry_s)
            self._must_look = True
            await asyncio.sleep(self._limits.retry_s)

    # ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _turn(self, app: ASGIApp) -> None:
        """Store ends and tokens, and open lines as far as there is room."""
        is_new = self._must_look or self._is_expired()
        if is_new:
            self._must_look = False
            await self._look()
        await self._save(has_tokens=self._monotonic() >= self._save_at)
        if is_new:
            self._has_paperwork.set()
        num_bytes = sum(run.num_bytes for run, _ in self._runs.values())
        room = self._limits.max_open - len(self._runs)
        if room > 0 and num_bytes < self._limits.max_bytes:
            await self._start(app, await self._batches.open_lines(room, self._limits.max_bytes - num_bytes))
        self._metrics.on_open_lines(len(self._runs))

    def _is_expired(self) -> bool:
        return self._next_expiry is not None and self._now() >= self._next_expiry

    async def _look(self) -> None:
        """End the windows that are over, and the requests of batches that are not in progress any more."""
        batches, now = await self._batches.open_batches(), self._now()
        self._metrics.on_batches(each.record.batch.status for each in batches)
        waiting = [each for each in batches if each.record.batch.status in ("validating", "in_progress")]
        running = {each.number for each in waiting if each.record.expires_at > now}
        for batch in waiting:
            if batch.number not in running:
                await self._batches.expire(batch.number)
        self._stop_runs([key for key in self._runs if key[0] not in running])
        self._next_expiry = min((each.record.expires_at for each in waiting if each.number in running), default=None)

    def _stop_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        """Abort requests; keep the tokens that they have."""
        for key in keys:
            run, task = self._runs.pop(key)
            task.cancel()
            self._take_tokens(run)

    async def _start(self, app: ASGIApp, opened: Sequence[tuple[StoredBatch, OpenLine]]) -> None:
        """Start the requests of lines that are open in the database."""
        batches = {batch.number: batch for batch, _ in opened}
        paths = {
            number: await self._files.input_path(batch.owner, batch.record.batch.input_file_id)
            for number, batch in batches.items()
        }
        bodies = await self._batches.read_bodies([(paths[line.batch], line) for _, line in opened])
        for (batch, line), body in zip(opened, bodies, strict=True):
            run = LineRun(app, batch, line, body, self._served_model)
            self._runs[line.batch, line.number] = run, asyncio.ensure_future(self._finish(run))

    async def _finish(self, run: LineRun) -> None:
        """Run a line up to its end."""
        try:
            outcome = await run.run()
        except Exception as error:
            logger.exception("a line of a batch failed")
            outcome = run.failed(error)
        self._runs.pop((run.line.batch, run.line.number))
        self._outcomes.append(outcome)
        self._changed.set()

    async def _save(self, *, has_tokens: bool) -> None:
        """Store the ends of lines, and the tokens of open ones if `has_tokens`. After a failure the next call does."""
        if has_tokens:
            self._save_at = self._monotonic() + self._limits.save_s
            for run, _ in self._runs.values():
                self._take_tokens(run)
        tokens, outcomes = list(self._tokens), list(self._outcomes)
        if not (tokens or outcomes):
            return
        if await self._batches.save(tokens, outcomes):
            self._must_look = True
            self._changed.set()
        for outcome in outcomes:
            usage = outcome.usage
            self._metrics.on_line(outcome.end.status == 200, usage.input_tokens, usage.output_tokens)
        del self._tokens[: len(tokens)], self._outcomes[: len(outcomes)]

    def _take_tokens(self, run: LineRun) -> None:
        tokens = run.take_tokens()
        if tokens is not None:
            self._tokens.append(tokens)

    async def _wait(self) -> None:
        """Wait for the next turn: lines have ended, a batch has changed, a window ends, or tokens are to be stored."""
        waits = [self._save_at - self._monotonic()] if self._runs else []
        if self._next_expiry is not None:
            waits.append(self._next_expiry - self._now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(min(waits), 0.0) if waits else None):
                await self._changed.wait()
            await asyncio.sleep(self._limits.gather_s)
        self._changed.clear()

    def _has_lines(self, batch: int) -> bool:
        """Return whether lines of a batch run, or have ended and are not stored."""
        return any(number == batch for number, _ in self._runs) or any(
            each.end.batch == batch for each in self._outcomes
        )

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _do_paperwork(self) -> None:
        """Check input files and write output files whenever a batch needs it."""
        try:
            while True:
                await self._persist(lambda: self._clerk.work(self.wake, self._has_lines))
                await self._has_paperwork.wait()
                self._has_paperwork.clear()
        finally:
            self._clerk.close()
