"""The metrics: what Prometheus's own parser reads in them, and names that never change unseen."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenloom.frontend.metrics import Counter, Gauge, Histogram, Registry
from tokenloom.frontend.metrics_engine import SECONDS, EngineMetrics
from tokenloom.ipc.config import EngineConfig
from tokenloom.ipc.messages import Progress

from .samples import new_spec

GOLDEN = Path(__file__).parent / "metric_names.txt"
DASHBOARDS = Path(__file__).parents[2] / "docs" / "dashboards"


def new_metrics(**options: object) -> EngineMetrics:
    return EngineMetrics(new_spec(config=EngineConfig(**options)))  # type: ignore[arg-type]


def names(metrics: EngineMetrics) -> list[str]:
    families = text_string_to_metric_families(metrics.render())
    return sorted(f"{family.type} {family.name}" for family in families)


def test_names_and_types_are_those_of_the_golden_file() -> None:
    assert names(new_metrics()) == GOLDEN.read_text().split("\n")[:-1]


def test_the_switch_changes_the_prefix_and_nothing_else() -> None:
    ours, theirs = new_metrics().render(), new_metrics(metrics_names="vllm").render()
    samples = [line for line in ours.splitlines() if "step_age" not in line]
    others = [line for line in theirs.splitlines() if "step_age" not in line]
    assert [line.replace("tokenloom_", "vllm:", 1) for line in samples] == others


def test_a_histogram_is_what_prometheus_would_count() -> None:
    rng = random.Random(5)
    histogram = Histogram("time_seconds", "Time.", SECONDS)
    values = [rng.expovariate(3.0) for _ in range(500)] + list(SECONDS)
    for value in values:
        histogram.observe(value)
    registry = Registry("x_", (("model", 'a"b\\c\nd'),))
    registry.metrics.append(histogram)
    (family,) = text_string_to_metric_families(registry.render())
    found = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    for bound in SECONDS:
        key = next(le for le in found if le[0].isdigit() and math.isclose(float(le), bound))
        assert found[key] == sum(value <= bound for value in values)
    assert found["+Inf"] == found["x_time_seconds_count"] == len(values)
    assert found["x_time_seconds_sum"] == pytest.approx(sum(values))
    assert {sample.labels["model"] for sample in family.samples} == {'a"b\\c\nd'}
    assert histogram.cumulative[bisect_left(SECONDS, 0.1)] == sum(value <= 0.1 for value in values)


def test_counters_and_gauges_read_as_they_are() -> None:
    counter, level = Counter("ends_total", "Ends.", ["reason"]), [1.0]
    counter.add(2, "stop")
    counter.add(0.5, "stop")
    counter.raise_to(7, "abort")
    counter.raise_to(3, "abort")
    registry = Registry("", ())
    registry.metrics += [counter, Gauge("level", "Level.", lambda: level[0])]
    level[0] = 4.25
    families = {family.name: family for family in text_string_to_metric_families(registry.render())}
    assert {s.labels["reason"]: s.value for s in families["ends"].samples} == {"stop": 2.5, "abort": 7}
    assert [s.value for s in families["level"].samples] == [4.25]
    assert counter.sum == 9.5


def test_a_new_core_which_counts_from_zero_takes_nothing_away() -> None:
    metrics = new_metrics()
    for step in (3, 10, 10, 2, 5):  # the core is replaced after its 10th step
        metrics.on_progress(Progress(step=step, step_age_s=0.0, num_running=0, num_waiting=0, execute_s=step / 10))
    assert metrics.steps.sum == 15
    assert metrics.step_seconds.get("device") == pytest.approx(1.5)


def test_the_dashboard_and_the_alerts_use_metrics_that_there_are() -> None:
    kinds = dict(reversed(line.split()) for line in GOLDEN.read_text().splitlines())  # type: ignore[misc]
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {name + ending for name, kind in kinds.items() for ending in endings[kind]}
    for file in ("grafana.json", "alerts.yml", "alerts_test.yml"):
        used = set(re.findall(r"\btokenloom_[a-z0-9_]+", (DASHBOARDS / file).read_text())) - {"tokenloom_"}
        assert used and used <= known, (file, used - known)
