"""Faults of a simulated fleet, as data: a JSON list of objects with `kind` and `at_s`.

[{"kind": "kill", "at_s": 100, "num": 200, "back_after_s": 30},
 {"kind": "slow", "at_s": 50, "num": 1, "factor": 4, "for_s": 60},
 {"kind": "partition", "at_s": 50, "num": 3, "for_s": 20},
 {"kind": "rolling_restart", "at_s": 50, "every_s": 5, "drain_s": 10, "back_after_s": 30},
 {"kind": "poison", "at_s": 50}]
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import msgspec


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: float


class Kill(_Fault, frozen=True, kw_only=True, tag="kill"):
    """Fault that ends `num` replicas at once; each comes back with an empty cache."""

    num: int = 1
    noticed_after_s: float = 0.1  # 3 s without an answer, if they are on other hosts
    back_after_s: float = 30.0


class Slow(_Fault, frozen=True, kw_only=True, tag="slow"):
    """Fault that lets the steps of `num` replicas take `factor` times as long."""

    num: int = 1
    factor: float = 4.0
    for_s: float = 60.0


class Partition(_Fault, frozen=True, kw_only=True, tag="partition"):
    """Fault that cuts `num` replicas off from the frontend. Either side gives the other up after `lease_s`."""

    num: int = 1
    for_s: float = 20.0
    lease_s: float = 3.0


class RollingRestart(_Fault, frozen=True, kw_only=True, tag="rolling_restart"):
    """Restart of all replicas, one every `every_s`: no new requests for `drain_s`, then its answers move."""

    every_s: float = 5.0
    drain_s: float = 10.0
    back_after_s: float = 30.0


class Poison(_Fault, frozen=True, kw_only=True, tag="poison"):
    """Fault that lets the next request end every replica that computes it."""


Fault: TypeAlias = Kill | Slow | Partition | RollingRestart | Poison


def read_faults(given: str) -> list[Fault]:
    """Return the faults of a JSON text, or of the file of this name."""
    text = given if given.lstrip().startswith("[") else Path(given).read_text(encoding="utf-8")
    try:
        return msgspec.json.decode(text, type=list[Fault])
    except msgspec.DecodeError as error:
        raise SystemExit(f"--faults: {error}; see the head of {__file__}") from None
