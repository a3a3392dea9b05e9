"""BatchClerk: checks the input files of new batches, and writes the output files of ended ones.

One batch after the other, in pieces, so that no file is in memory. Each piece is stored, and the id of an output file
is drawn from the batch's nonce, so that a successor goes on and no file is there twice. Knows no requests.
"""

from __future__ import annotations

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
    """Worker that brings batches from one status to the next."""

    def __init__(self, batches: Batches, files: BatchFiles, check: Check, max_line_bytes: int) -> None:
        """`check` asks an intake process; RequestError if it cannot read the file."""
        self._batches, self._files, self._check = batches, files, check
        self._max_line_bytes = max_line_bytes

    async def work(self) -> bool:
        """Bring each batch that needs it to its next status. Return whether one has changed. After all of them, raise
        the last error of one."""
        has_changed = False
        failure: Exception | None = None
        for batch in await self._batches.open_batches():
            status = batch.record.batch.status
            try:
                if status == "validating":
                    await self._validate(batch)
                    has_changed = True
                elif status in ("finalizing", "cancelling"):
                    await self._write_outputs(batch)
                    has_changed = True
            except Exception as error:
                failure = error
        while await self._batches.delete_ended():
            pass
        if failure is not None:
            raise failure
        return has_changed

    async def _validate(self, batch: StoredBatch) -> None:
        record, number = batch.record, batch.number
        path = await self._files.input_path(batch.owner, record.batch.input_file_id)
        if path is None:
            message = f"the input file {record.batch.input_file_id:.80} is gone: upload it again"
            await self._batches.fail(number, BatchError("file_not_found", message, "input_file_id"))
            return
        begin, line = record.check_offset, record.check_number
        is_validating = True
        while is_validating:
            question = CheckBatch(
                path=str(path),
                offset=begin,
                number=line,
                endpoint=record.batch.endpoint,
                max_line_bytes=self._max_line_bytes,
            )
            try:
                checked = await self._check(question)
            except RequestError as error:
                await self._batches.fail(number, BatchError("invalid_file", str(error), "input_file_id", line))
                return
            is_validating = await self._batches.add_checked(number, begin, checked)
            begin, line = checked.offset, checked.number

    async def _write_outputs(self, batch: StoredBatch) -> None:
        """Write the lines in the order of the input: answers of status 200 to the output file, others to the error
        file. A file without lines is not written."""
        if batch.record.has_expired or batch.record.batch.status == "cancelling":
            await self._batches.close_lines(batch.number)
        output, errors = _Output(self._files, batch, "output"), _Output(self._files, batch, "error")
        try:
            after = 0
            while lines := await self._batches.ended_lines(batch.number, after, NUM_LINES, PIECE_BYTES):
                await output.write([line.answer for line in lines if line.status == 200])
                await errors.write([line.answer or _unanswered(batch, line) for line in lines if line.status != 200])
                after = lines[-1].number
            await self._batches.finish(batch.number, await output.finish(), await errors.finish())
        finally:
            output.discard()
            errors.discard()


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
