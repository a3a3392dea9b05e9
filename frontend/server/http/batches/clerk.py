"""BatchClerk: checks the input files of new batches, and writes the output files of ended ones.

It works in pieces, so that no file is in memory. Each piece is stored, and the id of an output file is drawn from the
batch's nonce, so that a successor goes on and no file is there twice. Knows no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from .....ipc.errors import RequestError
from .....ipc.messages.intake import BatchChecked, CheckBatch
from ....forms.openai.batches.batch import BatchError
from ....forms.openai.batches.line import OutputId, unanswered_line
from ....state.batches.lines import EndedLine
from ....state.batches.store import Batches, StoredBatch

NUM_LINES = 256  # that are read and written at a time
PIECE_BYTES = 4 << 20
Check: TypeAlias = Callable[[CheckBatch], Awaitable[BatchChecked]]


class OutputWriter(Protocol):
    """A file that is being written; it is there for clients once it has finished."""

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> object: ...

    def discard(self) -> None:
        """Remove the file, unless it has finished."""


class BatchFiles(Protocol):
    """The files of the engine, as a batch reads and writes them."""

    async def input_path(self, owner: bytes, file_id: str) -> Path | None:
        """Return the path of a file of purpose batch; None if there is none."""

    async def create_output(self, owner: bytes, file_id: str, name: str, expires_s: int | None) -> OutputWriter:
        """Begin a file of purpose batch_output, in place of one with this id. `expires_s`: its life; None: the usual
        one."""


class BatchClerk:
    """Worker that brings batches from one status to the next. Keys take turns: in a round each key that has work gets
    one piece of it, so that no key waits for a large file of another."""

    def __init__(self, batches: Batches, files: BatchFiles, check: Check, max_line_bytes: int) -> None:
        """`check` asks an intake process; RequestError if it cannot read the file."""
        self._batches, self._files, self._check = batches, files, check
        self._max_line_bytes = max_line_bytes
        self._outputs: dict[int, _Outputs] = {}  # by number of a batch: those that are being written

    async def work(
        self, on_change: Callable[[], None] = lambda: None, has_lines: Callable[[int], bool] = lambda number: False
    ) -> None:
        """Bring each batch that needs it to its next status; call `on_change` for each. A batch that `has_lines`, by
        its number, which run or are not stored yet, is left out. After all, raise the first error of one."""
        failed: dict[int, BaseException] = {}
        while await self._round(failed, on_change, has_lines):
            pass
        for failure in failed.values():
            raise failure

    def close(self) -> None:
        """Drop the outputs that are being written."""
        while self._outputs:
            self._outputs.popitem()[1].discard()

    async def _round(
        self, failed: dict[int, BaseException], on_change: Callable[[], None], has_lines: Callable[[int], bool]
    ) -> bool:
        """Do one piece of work for the oldest batch of each key, but for those that have failed, which are added to
        `failed`. Return whether there was anything to do."""
        first: dict[bytes, StoredBatch] = {}
        for batch in await self._batches.open_batches():
            is_due = batch.record.batch.status != "in_progress" and not has_lines(batch.number)
            if is_due and batch.number not in failed:
                first.setdefault(batch.owner, batch)
        results = await asyncio.gather(*map(self._advance, first.values()), return_exceptions=True)
        for batch, result in zip(first.values(), results, strict=True):
            if isinstance(result, BaseException):
                failed[batch.number] = result
            elif result:
                on_change()
        return await self._batches.delete_ended() or bool(first)

    async def _advance(self, batch: StoredBatch) -> bool:
        """Do one piece of a batch's work. Return whether its status has changed."""
        if batch.record.batch.status == "validating":
            return await self._validate(batch)
        outputs = self._outputs.pop(batch.number, None) or await self._begin_outputs(batch)
        try:
            if not await outputs.write_piece():
                self._outputs[batch.number] = outputs
                return False
            await self._batches.finish(batch.number, *await outputs.finish())
            return True
        finally:
            if batch.number not in self._outputs:
                outputs.discard()

    async def _validate(self, batch: StoredBatch) -> bool:
        """Check the next piece of the input file. Return whether it was the last."""
        record, number = batch.record, batch.number
        path = await self._files.input_path(batch.owner, record.batch.input_file_id)
        if path is None:
            message = f"the input file {record.batch.input_file_id:.80} is gone: upload it again"
            await self._batches.fail(number, BatchError("file_not_found", message, "input_file_id"))
            return True
        question = CheckBatch(
            path=str(path),
            offset=record.check_offset,
            number=record.check_number,
            endpoint=record.batch.endpoint,
            max_line_bytes=self._max_line_bytes,
        )
        try:
            checked = await self._check(question)
        except RequestError as error:
            fault = BatchError("invalid_file", str(error), "input_file_id", record.check_number)
            await self._batches.fail(number, fault)
            return True
        return not await self._batches.add_checked(number, record.check_offset, checked)

    async def _begin_outputs(self, batch: StoredBatch) -> _Outputs:
        if batch.record.has_expired or batch.record.batch.status == "cancelling":
            await self._batches.close_lines(batch.number)
        return _Outputs(self._batches, self._files, batch)


class _Outputs:
    """The output files of a batch, with the lines in the order of the input: answers of status 200 are in the output
    file, others in the error file. A file without lines is not written."""

    def __init__(self, batches: Batches, files: BatchFiles, batch: StoredBatch) -> None:
        self._batches, self._batch = batches, batch
        self._answers, self._errors = _Output(files, batch, "output"), _Output(files, batch, "error")
        self._after = 0  # number of the last line that is written

    async def write_piece(self) -> bool:
        """Write some lines; return whether there are no more."""
        batch = self._batch
        lines = await self._batches.ended_lines(batch.number, self._after, NUM_LINES, PIECE_BYTES)
        if not lines:
            return True
        await self._answers.write([line.answer for line in lines if line.status == 200])
        await self._errors.write([line.answer or _unanswered(batch, line) for line in lines if line.status != 200])
        self._after = lines[-1].number
        return False

    async def finish(self) -> tuple[str | None, str | None]:
        """Store the files, and return the ids of the output file and the error file."""
        return await self._answers.finish(), await self._errors.finish()

    def discard(self) -> None:
        """Remove the files that have not finished."""
        self._answers.discard()
        self._errors.discard()


class _Output:
    """An output file of a batch, which begins with its first line."""

    def __init__(self, files: BatchFiles, batch: StoredBatch, kind: str) -> None:
        self._files, self._batch, self._kind = files, batch, kind
        self._id = f"file-{batch.record.draw(kind).hex()}"
        self._writer: OutputWriter | None = None

    async def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._writer is None:
            name = f"{self._batch.record.batch.id}_{self._kind}.jsonl"
            expires_s = self._batch.record.output_expires_s
            self._writer = await self._files.create_output(self._batch.owner, self._id, name, expires_s)
        await self._writer.write(b"".join(lines))

    async def finish(self) -> str | None:
        """Store the file and return its id; None if it has no lines."""
        if self._writer is None:
            return None
        await self._writer.finish()
        return self._id

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()


def _unanswered(batch: StoredBatch, line: EndedLine) -> bytes:
    """Return the line of a request that did not run before its batch ended."""
    ids = OutputId(batch.record.line_id(line.number), line.custom_id)
    if batch.record.has_expired:
        window = batch.record.batch.completion_window
        message = f"the request did not end within the completion window, {window}: send it again in another batch"
        return unanswered_line(ids, "batch_expired", message)
    return unanswered_line(ids, "batch_cancelled", "the batch was cancelled before the request ended: send it again")
