"""Find the processes of a server or an engine, with their titles, CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

import psutil

REST_S = 10.0
GLANCE_S = 0.25


def tree(root_pid: int) -> list[psutil.Process]:
    """Return a process and all of its descendants."""
    root = psutil.Process(root_pid)
    return [root, *root.children(recursive=True)]


def signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def signal_tree(root_pid: int, number: signal.Signals) -> None:
    """Signal a process and all of its descendants, those that still exist."""
    with contextlib.suppress(psutil.NoSuchProcess):
        signal_all(tree(root_pid), number)


def title(process: psutil.Process) -> str:
    """Return the title that a process set, or the script that its Python runs."""
    with contextlib.suppress(psutil.Error):
        words = [word.rpartition("/")[2] for word in " ".join(process.cmdline()).split()[:5]]
        return next((word for word in words if word.endswith(".py")), " ".join(words[:4]))
    return "ended"


def cpu_by_process(processes: list[psutil.Process]) -> dict[str, float]:
    """Return the CPU seconds so far, user and system, by title and pid."""
    return {f"{title(each)} ({each.pid})": sum(each.cpu_times()[:2]) for each in processes}


def used_since(before: Mapping[str, float], processes: list[psutil.Process]) -> dict[str, float]:
    """Return the CPU seconds by process since `before`, an earlier result of `cpu_by_process`."""
    return {name: used - before.get(name, 0.0) for name, used in cpu_by_process(processes).items()}


def machine_now() -> dict[str, float]:
    """Return the load average of the last minute and the cores in use within GLANCE_S, stolen time included: before a
    measurement, while everything measured rests, what others take from it."""
    return {"load": os.getloadavg()[0], "busy_cores": psutil.cpu_percent(GLANCE_S) / 100 * (psutil.cpu_count() or 1)}


def idle_percents(groups: Mapping[str, list[psutil.Process]], seconds: float) -> dict[str, float]:
    """Rest until the work of the last requests is over, then return the CPU time of each group of processes within
    `seconds`, in percent of a core."""
    time.sleep(REST_S)
    before = {name: cpu_by_process(processes) for name, processes in groups.items()}
    time.sleep(seconds)
    used = {name: sum(used_since(before[name], processes).values()) for name, processes in groups.items()}
    return {name: 100 * used_s / seconds for name, used_s in used.items()}


def is_worker(name: str) -> bool:
    """Return whether a process of ours or of vLLM computes the model; its time is not the engine's own cost."""
    return name.startswith(("tokenloom worker", "tokenloom null worker", "VLLM::Worker"))


def own_cost_s(used: Mapping[str, float]) -> float:
    """Sum the CPU seconds of the processes that are not workers."""
    return sum(seconds for name, seconds in used.items() if not is_worker(name))


def pss_bytes(processes: list[psutil.Process]) -> dict[str, int]:
    """Return the proportional set size by title (a shared page is divided among its processes)."""
    return {title(each): each.memory_full_info().pss for each in processes}
