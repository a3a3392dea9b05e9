"""Random changes to files, each in a process that is killed before one of its system calls; run as a program.

The model is a dict of contents. After each change a new process compares: a change that was acknowledged is there, any
other is there as a whole or not at all (of a file that replaces another, neither may be there), each row has its whole
content, and after a sweep the folder holds no other file. One word is printed for each change: acknowledged, undone, or
done (though not acknowledged).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.files import Description, Files
from tokenloom.frontend.state.schema import FILE

EVENTS = ("open", "fcntl.flock", "os.truncate", "os.rename", "os.remove")  # of Python's audit hooks
MAX_EVENTS = 12  # of one change in the folder
OWNER = b"me"
KILLED = 9


class Change:
    """One call: a file is stored, or deleted. `content`: None for a deletion."""

    def __init__(self, file_id: str, content: bytes | None) -> None:
        self.file_id, self.content = file_id, content

    async def make(self, files: Files) -> None:
        if self.content is None:
            await files.delete(OWNER, self.file_id)
            return
        writer = await files.begin(OWNER, self.file_id, Description("name", "batch", None))
        for place in range(0, len(self.content), 700_000):
            await writer.write(self.content[place : place + 700_000])
        await writer.finish()

    def results(self, model: dict[str, bytes]) -> list[dict[str, bytes]]:
        """Return the models after the change, and those that may be left if it is killed."""
        without = {name: content for name, content in model.items() if name != self.file_id}
        if self.content is None:
            return [without, model]
        return [without | {self.file_id: self.content}, without, model]


def in_process(folder: Path, work: Callable[[Files], Awaitable[None]], num_events: int | None = None) -> bool:
    """Do the work in a process, which is killed before event `num_events` in the folder; return whether it ended. Its
    errors are ours."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if num_events is not None:
                sys.addaudithook(killer(folder, num_events))
            asyncio.run(with_files(folder, work))
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), "an error in the process"
    return code == 0


async def with_files(folder: Path, work: Callable[[Files], Awaitable[None]]) -> None:
    database = Database(folder / FILE, is_durable=True)
    files = Files(database, folder / "files", 1 << 30)
    await work(files)
    files.close()
    database.close()


def killer(folder: Path, num_events: int) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that ends the process before event `num_events` on a file, counted from 0."""
    left = [num_events]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        is_ours = event == "fcntl.flock" or str(folder / "files") in str(arguments[0] if arguments else "")
        if event in EVENTS and is_ours:
            if left[0] == 0:
                os._exit(KILLED)
            left[0] -= 1

    return hook


def run(folder: Path, seed: int, num_changes: int) -> None:
    (folder / "files").mkdir()
    rng = random.Random(seed)
    model: dict[str, bytes] = {}
    for _ in range(num_changes):
        content = None if rng.random() < 0.4 else rng.randbytes(rng.choice((9, 2_000_000)))
        change = Change(f"file-{rng.randrange(4)}", content)
        is_acknowledged = in_process(folder, change.make, rng.randrange(MAX_EVENTS))
        results = change.results(model)
        if is_acknowledged:
            results = results[:1]

        async def compare(files: Files, results: list[dict[str, bytes]] = results) -> None:
            page = await files.page(OWNER, None, 100, is_ascending=True, purpose=None)
            stored = {record.id: (folder / "files" / record.id).read_bytes() for record in page.records}
            assert stored in results, f"seed {seed}: {sorted(stored)}"
            assert all(record.num_bytes == len(stored[record.id]) for record in page.records)
            await files.sweep()
            assert sorted(os.listdir(folder / "files")) == sorted(stored)
            (folder / "result").write_text(str(results.index(stored)))

        assert in_process(folder, compare), "nothing kills it"
        place = int((folder / "result").read_text())
        print("acknowledged" if is_acknowledged else "undone" if place else "done")
        model = results[place]


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
