"""Counters, gauges and histograms in Prometheus's text format. Knows nothing of requests.

For one thread only, so that a count costs an addition and an observation a bisection. The text is rendered at a scrape;
gauges call a function then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ...ipc.messages import metrics as messages

Labels = tuple[tuple[str, str], ...]  # (name, value)


class Counter:
    """A total for each combination of label values; never decreases."""

    kind = "counter"

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        """`name` ends in _total."""
        self.name, self.help = name, help
        self._label_names = tuple(label_names)
        self._values: dict[tuple[str, ...], float] = {} if label_names else {(): 0.0}

    def add(self, amount: float, *label_values: str) -> None:
        self._values[label_values] = self._values.get(label_values, 0.0) + amount

    def raise_to(self, total: float, *label_values: str) -> None:
        """Set the total to that of an external counter; a lower value is ignored."""
        self._values[label_values] = max(total, self._values.get(label_values, 0.0))

    def get(self, *label_values: str) -> float:
        return self._values.get(label_values, 0.0)

    @property
    def sum(self) -> float:
        return sum(self._values.values())

    def samples(self) -> list[tuple[str, Labels, float]]:
        return [
            (self.name, tuple(zip(self._label_names, values, strict=True)), total)
            for values, total in self._values.items()
        ]


class Gauge:
    """The result of a function at the scrape: a number, or one for each value of the label `label_name`."""

    kind = "gauge"

    def __init__(
        self, name: str, help: str, read: Callable[[], float | Mapping[str, float]], label_name: str = ""
    ) -> None:
        self.name, self.help = name, help
        self._read = read
        self._label_name = label_name

    def samples(self) -> list[tuple[str, Labels, float]]:
        value = self._read()
        if not isinstance(value, Mapping):
            return [(self.name, (), value)]
        return [(self.name, ((self._label_name, label),), each) for label, each in value.items()]


class Info:
    """A gauge of value 1 with the labels that a function returns; without labels there is no sample."""

    kind = "gauge"

    def __init__(self, name: str, help: str, read: Callable[[], Mapping[str, object]]) -> None:
        self.name, self.help = name, help
        self._read = read

    def samples(self) -> list[tuple[str, Labels, float]]:
        labels = tuple((label, str(value)) for label, value in self._read().items())
        return [(self.name, labels, 1.0)] if labels else []


class Histogram:
    """Counts observations by upper bound, and their sum."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def add_counts(self, counts: Sequence[int], sum: float) -> None:
        """Add the observations of another histogram with the same bounds: count per bucket, and sum."""
        for place, count in enumerate(counts):
            self._counts[place] += count
        self.sum += sum

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def cumulative(self) -> list[int]:
        """Number of observations at or below each bound, then of all."""
        total, found = 0, []
        for count in self._counts:
            total += count
            found.append(total)
        return found

    @property
    def buckets(self) -> dict[str, int]:
        """`cumulative` by bound."""
        names = [*(_number(bound) for bound in self._bounds), "+Inf"]
        return dict(zip(names, self.cumulative, strict=True))

    def samples(self) -> list[tuple[str, Labels, float]]:
        buckets: list[tuple[str, Labels, float]] = [
            (f"{self.name}_bucket", (("le", bound),), count) for bound, count in self.buckets.items()
        ]
        return [*buckets, (f"{self.name}_sum", (), self.sum), (f"{self.name}_count", (), self.count)]


Metric: TypeAlias = Counter | Gauge | Info | Histogram  # one family: a name, a kind and its samples


class Registry:
    """Metrics in the order of their addition, with a common name prefix and common labels."""

    def __init__(self, prefix: str, labels: Labels) -> None:
        self._prefix = prefix
        self._labels = labels
        self.metrics: list[Metric] = []

    def render(self) -> str:
        """Format all metrics in Prometheus's text format 0.0.4."""
        lines: list[str] = []
        for metric in self.metrics:
            name = self._prefix + metric.name
            lines.append(f"# HELP {name} {metric.help}")
            lines.append(f"# TYPE {name} {metric.kind}")
            for sample, labels, value in metric.samples():
                written = ",".join(f'{key}="{_escape(text)}"' for key, text in (*self._labels, *labels))
                lines.append(f"{self._prefix}{sample}{{{written}}} {_number(value)}")
        return "\n".join(lines) + "\n"

    def read(self) -> list[messages.Metric]:
        """Return all metrics as structs."""
        found: list[messages.Metric] = []
        for metric in self.metrics:
            name = self._prefix + metric.name
            if isinstance(metric, Histogram):
                found.append(
                    messages.Histogram(
                        name=name, labels=dict(self._labels), count=metric.count, sum=metric.sum, buckets=metric.buckets
                    )
                )
                continue
            form = messages.Counter if isinstance(metric, Counter) else messages.Gauge
            for _, labels, value in metric.samples():
                found.append(form(name=name, labels=dict(self._labels + labels), value=float(value)))  # a bool, too
        return found


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
