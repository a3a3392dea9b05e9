"""One rank of a tensor-parallel run, as a process of its own: python -m tokenloom.tests.workers.tp_rank PLAN RANK

PLAN is a JSON file: {"size", "store", "folders", "is_borrowed", "results", "tokens", "dies": rank or null, "device"}.
Rank 0 writes the logits of every request to RESULTS/<index of the folder>-<request>.npy; a rank that "dies" leaves
before the first step. All ranks share the device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.model_step import Model
from tokenloom.workers.parallel import ParallelGroup
from tokenloom.workers.rendezvous import LocalRendezvous

TIMEOUT_S = 120.0  # a rank may compile kernels for so long


def main(plan_file: str, rank: int) -> None:
    plan = json.loads(Path(plan_file).read_text())
    torch.set_num_threads(1)
    device = torch.device(plan["device"])
    place = (rank, plan["size"], device, LocalRendezvous(Path(plan["store"])), TIMEOUT_S)
    group = ParallelGroup.connect(*place, backend="gloo")
    check_collectives(group, device)
    if plan["dies"] == rank:
        os._exit(9)
    for index, folder in enumerate(plan["folders"]):
        make = borrowed if plan["is_borrowed"] else load
        run = PagedRun(make(Path(folder), group=group, device=device), block_size=16, device=device)
        run.step({"a": plan["tokens"]["a"][:40]})
        logits = run.step({"a": plan["tokens"]["a"][40:], "b": plan["tokens"]["b"]})
        for name, values in logits.items():
            np.save(Path(plan["results"]) / f"{index}-{name}.npy", values.cpu().numpy())
    group.close()


def borrowed(folder: Path, group: ParallelGroup | None = None, device: torch.device = CPU) -> Model:
    """Load a model on transformers' layers."""
    from tokenloom.workers.borrowed.load import load_borrowed  # imports transformers

    config = load_model_config(folder, implementation="transformers")
    ops = select_ops(device, torch.float32)
    return load_borrowed(folder, config, EngineConfig(), 128, torch.float32, device, ops, group)


def check_collectives(group: ParallelGroup, device: torch.device) -> None:
    """Check every collective on odd shapes and in half precision."""
    rank, size = group.rank, group.size
    numbers = torch.arange(6, dtype=torch.bfloat16, device=device).view(3, 2)
    mine, everyone = numbers + 10 * rank, torch.cat([numbers + 10 * r for r in range(size)], dim=-1)
    gathered = group.gather(mine.T.contiguous().T)  # not contiguous
    assert (gathered is not None and torch.equal(gathered, everyone)) if rank == 0 else gathered is None
    assert torch.equal(group.gather_everywhere(mine.T.contiguous().T), everyone)
    ones, sum_of_ranks = torch.ones(2, 3, device=device), size * (size + 1) / 2
    assert torch.equal(group.all_reduce(ones * (rank + 1)), ones * sum_of_ranks)
    assert torch.equal(group.broadcast(ones * (rank + 5)), ones * 5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # as a worker does: at the interpreter's exit threads of torch may still want its lock
