"""One rank of a tensor-parallel run, as a process of its own: python -m tokenloom.tests.workers.tp_rank PLAN RANK

PLAN is a JSON file: {"size", "store", "folders", "results", "tokens", "dies": rank or null, "device"}. Rank 0 writes
the logits of every request to RESULTS/<index of the folder>-<request>.npy. A rank that "dies" leaves then, before a
last collective. All ranks share the device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.machine.rendezvous import LocalRendezvous
from tokenloom.workers.step.model_step import Model

TIMEOUT_S = 120.0  # a rank may compile kernels for so long


def main(plan_file: str, rank: int) -> None:
    plan = json.loads(Path(plan_file).read_text())
    torch.set_num_threads(1)
    device = torch.device(plan["device"])
    place = (rank, plan["size"], device, LocalRendezvous(Path(plan["store"])), TIMEOUT_S)
    group = ParallelGroup.connect(*place, backend="gloo")
    check_collectives(group, device)
    for index, folder in enumerate(plan["folders"]):
        logits = second_step(load(Path(folder), group=group, device=device), plan["tokens"], device)
        for name, values in logits.items():
            np.save(Path(plan["results"]) / f"{index}-{name}.npy", values.cpu().numpy())
    if plan["dies"] == rank:
        os._exit(9)
    group.all_reduce(torch.ones(1, device=device))
    group.close()


def second_step(model: Model, tokens: dict[str, list[int]], device: torch.device = CPU) -> dict[str, Tensor]:
    """Return the logits of a step of the last token of request a and all of b, on rank 0."""
    run = PagedRun(model, block_size=16, device=device)
    run.step({"a": tokens["a"][:40]})
    return run.step({"a": tokens["a"][40:], "b": tokens["b"]})


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
