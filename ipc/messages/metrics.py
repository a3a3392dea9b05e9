"""Engine metrics as structs, for programs that use a client: one struct for each metric and its labels, named as in
/metrics."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Metric(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    labels: dict[str, str]


class Counter(_Metric, frozen=True, kw_only=True, tag="counter"):
    """A total that only grows."""

    value: float


class Gauge(_Metric, frozen=True, kw_only=True, tag="gauge"):
    """A current value."""

    value: float


class Histogram(_Metric, frozen=True, kw_only=True, tag="histogram"):
    """A distribution. `buckets`: bound → number of observations at or below it; +Inf counts all."""

    count: int
    sum: float
    buckets: dict[str, int]


Metric: TypeAlias = Counter | Gauge | Histogram
