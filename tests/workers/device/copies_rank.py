"""One of two ranks that store a block in a step without rows: python -m tokenloom.tests.workers.device.copies_rank PLAN
RANK. PLAN is a JSON file: {"store", "arena", "go"}: files of the group and of the slots, and a FIFO.

Rank 1 begins when rank 0 says so: by then rank 0 must be in the step, and still must be without its result.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import torch

from tokenloom.ipc.process.arena import Arena, ArenaShape
from tokenloom.tests.workers.history_model import HistoryModel
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.tests.workers.random_schedule import frame, message
from tokenloom.workers.device.kv_copies import KVCopies
from tokenloom.workers.input_batch import InputBatch
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.parallel import ParallelGroup
from tokenloom.workers.rendezvous import LocalRendezvous

TIMEOUT_S = 60.0
PATIENCE_S = 0.5  # in which a step that waits for nobody would have ended


def main(plan_file: str, rank: int) -> None:
    plan = json.loads(Path(plan_file).read_text())
    torch.set_num_threads(1)
    group = ParallelGroup.connect(rank, 2, CPU, LocalRendezvous(Path(plan["store"])), TIMEOUT_S)
    kv_cache = torch.full((9, 1, 2, 1, 4, 1), rank + 1.0)
    arena = Arena(os.open(plan["arena"], os.O_RDWR), ArenaShape(num_slots=2, slot_bytes=64))
    copies = KVCopies(arena, kv_cache, group, range(group.size))
    runner = ModelRunner(HistoryModel(), InputBatch(2, 8, 4, 9), kv_cache, group, copies=copies)
    step = msgspec.structs.replace(message(), stores=frame(3, 1))
    group.broadcast(torch.zeros(1))  # both are here
    if rank == 1:
        assert Path(plan["go"]).read_text() == "go"
        runner.execute(step)
    else:
        thread = threading.Thread(target=runner.execute, args=(step,), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert thread.is_alive(), "rank 0 has a result before rank 1 has copied"
        Path(plan["go"]).write_text("go")
        thread.join(TIMEOUT_S)
        assert np.frombuffer(arena.slot(1), np.float32).tolist() == [1.0] * 8 + [2.0] * 8
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # as a worker does: at the interpreter's exit threads of torch may still want its lock
