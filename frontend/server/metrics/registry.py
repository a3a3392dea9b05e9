"""Counters, gauges and histograms of one thread, rendered by prometheus_client at a scrape. Knows nothing of requests.

The totals are kept here, because they change with each message of the core, and prometheus_client's take a lock for
each change: an observation costs 170 ns here and 880 ns there, an addition 110 and 330 ns, with a label 150 and 1240
ns. Importing prometheus_client takes 20 ms, so an engine without HTTP does not import it; the HTTP server imports it
before it listens, because a scrape must not need a free descriptor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, cast

import msgspec

from ....ipc.messages import metrics as messages

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Labels: TypeAlias = dict[str, str]
Readings: TypeAlias = list[tuple[Labels, float]]  # a gauge's values, each with its labels


class MetricState(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of a metric, to be added to the same metric in another frontend."""

    values: list[tuple[tuple[str, ...], float]] = []  # a counter's by label values, a gauge's by label names and values
    counts: list[int] = []  # a histogram's, in each bucket by itself (not cumulative)
    sum: float = 0.0  # of a histogram's observations


class Counter:
    """Totals that never decrease, one for each combination of label values."""

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        """`name` must end in _total."""
        self.name, self.help = name, help
        self._label_names = tuple(label_names)
        self.totals: dict[tuple[str, ...], float] = {} if label_names else {(): 0.0}

    def add(self, amount: float, *label_values: str) -> None:
        self.totals[label_values] = self.totals.get(label_values, 0.0) + amount

    def raise_to(self, total: float, *label_values: str) -> None:
        """Set the total to that of an external counter; ignore a lower value."""
        self.totals[label_values] = max(total, self.totals.get(label_values, 0.0))

    def get(self, *label_values: str) -> float:
        return self.totals.get(label_values, 0.0)

    @property
    def sum(self) -> float:
        return sum(self.totals.values())

    @property
    def state(self) -> MetricState:
        return MetricState(values=list(self.totals.items()))

    def add_state(self, state: MetricState) -> None:
        for label_values, total in state.values:
            self.add(total, *label_values)

    def copy(self) -> Self:
        counter = type(self)(self.name, self.help, self._label_names)
        counter.totals = dict(self.totals)
        return counter

    def read(self, name: str, labels: Labels) -> list[messages.Counter]:
        return [
            messages.Counter(
                name=name, labels=labels | dict(zip(self._label_names, values, strict=True)), value=float(total)
            )
            for values, total in self.totals.items()
        ]


class Gauge:
    """Metric whose value is the result of `read` at the scrape: a number, or one number for each set of labels."""

    def __init__(
        self,
        name: str,
        help: str,
        read: Callable[[], float | Readings],
        read_own: Callable[[], float | Readings] | None = None,
    ) -> None:
        """`read_own` returns the part that belongs to this process alone; None: all of it."""
        self.name, self.help = name, help
        self._read, self._read_own = read, read_own or read
        self._added: list[MetricState] = []

    @property
    def state(self) -> MetricState:
        return MetricState(
            values=[(tuple(chain(*labels.items())), value) for labels, value in _readings(self._read_own)]
        )

    def add_state(self, state: MetricState) -> None:
        self._added.append(state)

    def copy(self) -> Self:
        return type(self)(self.name, self.help, self._read, self._read_own)

    def read(self, name: str, labels: Labels) -> list[messages.Gauge]:
        more = dict[tuple[str, ...], float]()
        for key, value in (each for state in self._added for each in state.values):
            more[key] = more.get(key, 0.0) + value
        return [
            messages.Gauge(
                name=name, labels=labels | own, value=float(value) + more.get(tuple(chain(*own.items())), 0.0)
            )
            for own, value in _readings(self._read)
        ]


def _readings(read: Callable[[], float | Readings]) -> Readings:
    found = read()
    return found if isinstance(found, list) else [({}, found)]


class Histogram:
    """Number of observations in each bucket, given by upper bounds, and the sum of their values."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def add_counts(self, counts: Sequence[int], sum: float) -> None:
        """Add the observations of another histogram with the same bounds. `counts`: the count of each bucket by itself,
        not cumulative; `sum`: the sum of the values."""
        for place, count in enumerate(counts):
            self._counts[place] += count
        self.sum += sum

    @property
    def state(self) -> MetricState:
        return MetricState(counts=list(self._counts), sum=self.sum)

    def add_state(self, state: MetricState) -> None:
        self.add_counts(state.counts, state.sum)

    def copy(self) -> Self:
        histogram = type(self)(self.name, self.help, self._bounds)
        histogram.add_state(self.state)
        return histogram

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def cumulative(self) -> list[int]:
        """The number of observations at or below each bound, and last the number of all."""
        return list(accumulate(self._counts))

    @property
    def buckets(self) -> dict[str, int]:
        """The counts of `cumulative`, by bound as text; the last bound is +Inf."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return dict(zip(bounds, self.cumulative, strict=True))

    def read(self, name: str, labels: Labels) -> list[messages.Histogram]:
        return [messages.Histogram(name=name, labels=labels, count=self.count, sum=self.sum, buckets=self.buckets)]


Metric: TypeAlias = Counter | Gauge | Histogram  # one family: a name and its samples
MetricT = TypeVar("MetricT", bound=Counter | Gauge | Histogram)


class Registry:
    """Metrics in the order in which they were added, with a common name prefix and common labels. It is a collector of
    prometheus_client.

    `own`: the metrics that count events of this process only. Reads show their sums over all frontends of the engine,
    by adding the states, by metric name, that `others` returns. Every process knows the remaining metrics completely.
    """

    def __init__(self, prefix: str, labels: Labels) -> None:
        self._prefix = prefix
        self._labels = labels
        self.metrics: list[Metric] = []
        self.own: list[Metric] = []
        self.others: Callable[[], Sequence[Mapping[str, MetricState]]] = tuple

    def joined(self, metric: MetricT) -> MetricT:
        """Return the metric with the sums over all frontends of the engine."""
        states = [found[metric.name] for found in self.others() if metric.name in found]
        if not states or not any(each is metric for each in self.own):
            return metric
        joined = cast(MetricT, metric.copy())
        for state in states:
            joined.add_state(state)
        return joined

    def _joined_all(self) -> list[Metric]:
        return [self.joined(metric) for metric in self.metrics]

    def read(self) -> list[messages.Metric]:
        """Return all metrics as messages for clients, with prefix and common labels."""
        return [each for metric in self._joined_all() for each in metric.read(self._prefix + metric.name, self._labels)]

    def render(self) -> str:
        """Return all metrics in Prometheus's text format 0.0.4."""
        from prometheus_client import generate_latest

        return generate_latest(self).decode()

    def collect(self) -> Iterator[Family]:
        """Yield a family of prometheus_client for each metric, even for one without samples."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric in self._joined_all():
            name = self._prefix + metric.name
            if isinstance(metric, Histogram):
                histogram = HistogramMetricFamily(name, metric.help, labels=list(self._labels))
                histogram.add_metric(list(self._labels.values()), list(metric.buckets.items()), metric.sum)
                yield histogram
                continue
            samples = metric.read(name, self._labels)
            kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
            family = kind(name, metric.help, labels=list(samples[0].labels) if samples else ())
            for each in samples:
                family.add_metric(list(each.labels.values()), each.value)
            yield family
