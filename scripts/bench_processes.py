"""The processes of a server or an engine, by the title that they show, and what they use."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psutil


def tree(root_pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    root = psutil.Process(root_pid)
    return [root, *root.children(recursive=True)]


def title(process: psutil.Process) -> str:
    """The title that a process took, or the script that its Python runs."""
    with contextlib.suppress(psutil.Error):
        words = [word.rpartition("/")[2] for word in " ".join(process.cmdline()).split()[:5]]
        return next((word for word in words if word.endswith(".py")), " ".join(words[:4]))
    return "ended"


def cpu_by_process(processes: list[psutil.Process]) -> dict[str, float]:
    """CPU seconds so far, user and system, by title and pid."""
    return {f"{title(each)} ({each.pid})": sum(each.cpu_times()[:2]) for each in processes}


def used_since(before: Mapping[str, float], processes: list[psutil.Process]) -> dict[str, float]:
    """CPU seconds by process since `before`, an earlier answer of `cpu_by_process`."""
    return {name: used - before.get(name, 0.0) for name, used in cpu_by_process(processes).items()}


def is_worker(name: str) -> bool:
    """Whether a process of ours or of vLLM computes the model: what is not counted as an engine's own cost."""
    return name.startswith(("tokenloom worker", "tokenloom null worker", "VLLM::Worker"))


def own_cost_s(used: Mapping[str, float]) -> float:
    """Of CPU seconds by process, those that are no worker's."""
    return sum(seconds for name, seconds in used.items() if not is_worker(name))


def pss_bytes(processes: list[psutil.Process]) -> dict[str, int]:
    """Proportional set size by title: shared pages count once, in parts."""
    return {title(each): each.memory_full_info().pss for each in processes}
