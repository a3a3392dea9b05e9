"""Faults on purpose, for the chaos harness: TOKENLOOM_FAULTS="worker.execute:0.001,core.turn:0.0005:7".

Each entry is POINT:PROBABILITY[:SEED]; at that point of the code, that share of passes raises InjectedFault. Without
the variable a point costs one lookup in an empty dict.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

POINTS = ("worker.execute", "core.turn", "frontend.turn")


class InjectedFault(Exception):
    """A fault that the harness asked for."""


@dataclass
class _Fault:
    probability: float
    random: random.Random = field(default_factory=random.Random)


def _read(text: str) -> dict[str, _Fault]:
    faults = {}
    for entry in filter(None, text.split(",")):
        point, probability, *seed = entry.split(":")
        if point not in POINTS:
            raise ValueError(f"TOKENLOOM_FAULTS names {point}, known points are {', '.join(POINTS)}")
        faults[point] = _Fault(float(probability), random.Random(f"{seed} {os.getpid()}"))
    return faults


_FAULTS = _read(os.environ.get("TOKENLOOM_FAULTS", ""))


def maybe_fail(point: str) -> None:
    """Raise InjectedFault if the harness has asked for it here and now."""
    fault = _FAULTS.get(point)
    if fault is not None and fault.random.random() < fault.probability:
        raise InjectedFault(f"injected at {point}")
