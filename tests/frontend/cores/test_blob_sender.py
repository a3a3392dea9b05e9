"""Parts of blobs are read in a thread; a part that cannot be read now gets no reply, and is asked for again."""

from __future__ import annotations

import threading
from pathlib import Path

from tokenloom.frontend.cores.blob_sender import BlobSender
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.messages.blobs import BlobChunk, BlobReply, GetBlob
from tokenloom.tests.support.engine_specs import in_folder, new_spec
from tokenloom.tests.support.shortages import few_descriptors, few_threads

DEADLINE_S = 20.0


def test_a_part_is_read_again_after_threads_and_descriptors_had_run_out(tmp_path: Path) -> None:
    spec = in_folder(new_spec(), tmp_path)
    digest = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes).put(b"abc")
    request, woken = GetBlob(digest=digest, offset=0, length=3), threading.Event()
    sender = BlobSender(spec, woken.set)
    with few_threads():
        sender.ask(1, request)
    replies = replies_to(sender, woken, GetBlob(digest=bytes(32), offset=0, length=3), 2)
    assert [core for core, _ in replies] == [2], "the first part was not read later"
    with few_descriptors():
        sender.ask(3, request)
        while sender._requests.qsize():
            pass
    ((core, reply),) = replies_to(sender, woken, request, 4)
    assert core == 4 and isinstance(reply, BlobChunk) and reply.data == b"abc"


def replies_to(sender: BlobSender, woken: threading.Event, request: GetBlob, core: int) -> list[tuple[int, BlobReply]]:
    woken.clear()
    sender.ask(core, request)
    assert woken.wait(DEADLINE_S)
    return sender.take()
