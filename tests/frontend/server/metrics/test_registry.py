"""Prometheus's parser reads the metrics, their names are those of the golden file, and their sums hold."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tokenloom.core.stats import CoreStats
from tokenloom.frontend.server.metrics.core_metrics import ROWS, STEP_TOKENS
from tokenloom.frontend.server.metrics.registry import Counter, Gauge, Histogram, Registry
from tokenloom.frontend.server.requests.engine_metrics import SECONDS, EngineMetrics
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages import metrics as messages
from tokenloom.ipc.messages.client import Abort
from tokenloom.ipc.messages.core import Finished, Started
from tokenloom.ipc.messages.supervisor import Progress
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.bench import Bench
from tokenloom.tests.support.engine_specs import new_spec

GOLDEN = Path(__file__).parent / "metric_names.txt"
ALL = {"kv_disk": "/disk", "enable_lora": True, "speculation": "lookup", "http": "0", "state_dir": "/state"}
DASHBOARDS = Path(__file__).parents[4] / "docs/operate/dashboards"


def new_metrics(**options: object) -> EngineMetrics:
    return EngineMetrics(new_spec(config=EngineConfig(**options)))  # type: ignore[arg-type]


def progress(step: int = 0, **fields: Any) -> Progress:
    return Progress(step=step, step_age_s=0.0, **{"num_running": 0, "num_waiting": 0} | fields)


def families(metrics: EngineMetrics | Registry) -> dict[str, Metric]:
    """Return the metrics as Prometheus's parser reads them, by name."""
    return {family.name: family for family in text_string_to_metric_families(metrics.render())}


def names(metrics: EngineMetrics) -> list[str]:
    return sorted(f"{family.type} {family.name}" for family in families(metrics).values())


def test_names_and_types_equal_the_golden_file() -> None:
    golden = GOLDEN.read_text().split("\n")[:-1]
    assert names(new_metrics(**ALL)) == golden
    # of engines with tiers, adapters, speculation, a state folder
    parts = ("tier_", "adapter_", "lora_", "spec_", "state_", "batch_lines", "batch_tokens", "batches_")
    optional = [f" tokenloom_{part}" for part in parts]
    plain = [line for line in golden if not any(prefix in line for prefix in optional)]
    assert names(new_metrics(speculation="off")) == plain


def test_blocks_of_cores_that_do_not_run_are_not_in_use() -> None:
    metrics = new_metrics()
    metrics.num_kv_blocks = 200
    assert metrics.kv_use == 0.0, "no core has reported"
    metrics.on_progress(progress(num_blocks=100, num_free_blocks=75))  # of one of two
    assert metrics.kv_use == 0.25


def test_metrics_names_changes_the_prefix_and_one_name_that_promtool_rejects() -> None:
    ours, theirs = new_metrics().render(), new_metrics(metrics_names="vllm").render()
    samples = [line for line in ours.splitlines() if "step_age" not in line]
    others = [line for line in theirs.splitlines() if "step_age" not in line]
    renamed = [line.replace("tokenloom_iteration_tokens", "tokenloom_iteration_tokens_total") for line in samples]
    assert [line.replace("tokenloom_", "vllm:", 1) for line in renamed] == others


NAMES_OF_VLLM = """gauge num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info
    num_requests_waiting_by_reason
counter prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source generation_tokens
    request_success admission_rejections
histogram iteration_tokens_total request_prompt_tokens request_generation_tokens request_params_n
    request_params_max_tokens request_num_preemptions time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds"""


def test_every_metric_of_vllms_dashboards_exists_with_its_type_and_labels() -> None:
    metrics = new_metrics(metrics_names="vllm")
    metrics.num_kv_blocks = 192
    metrics.on_progress(
        progress(num_running=1, num_waiting=9, num_deferred=2, num_flex=4, num_blocks=100, num_free_blocks=25)
    )
    found = families(metrics)
    kind = ""
    for word in NAMES_OF_VLLM.split():
        if word in ("gauge", "counter", "histogram"):
            kind = word
            continue
        assert found[f"vllm:{word}"].type == kind, word
    (config,) = found["vllm:cache_config_info"].samples
    labels = {"block_size": "16", "enable_prefix_caching": "True", "cache_dtype": "auto", "num_gpu_blocks": "192"}
    labels |= {"kv_cache_size_tokens": "3072", "kv_cache_max_concurrency": "6.0"}
    assert config.value == 1 and labels.items() <= config.labels.items()
    waiting = {sample.labels["reason"]: sample.value for sample in found["vllm:num_requests_waiting_by_reason"].samples}
    assert waiting == {"capacity": 3, "deferred": 2, "flex": 4}
    read_by_pickers = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    assert [found[f"vllm:{name}"].samples[0].value for name in read_by_pickers] == [9, 1, 0.75]


def test_a_full_queue_counts_as_a_rejection_by_its_reason() -> None:
    metrics = new_metrics()
    for requests, tokens in ((1, 0), (1, 3), (0, 1)):  # the last is a new core's
        refused = {"num_refused_for_requests": requests, "num_refused_for_tokens": tokens}
        metrics.on_progress(progress(**refused))
    assert metrics.core.rejections.get("max_num_queued_reqs") == 1
    assert metrics.core.rejections.get("max_num_queued_tokens") == 4


def test_prometheus_parses_the_counts_and_sum_of_a_histogram() -> None:
    rng = random.Random(5)
    histogram = Histogram("time_seconds", "Time.", SECONDS)
    values = [rng.expovariate(3.0) for _ in range(500)] + list(SECONDS)
    for value in values:
        histogram.observe(value)
    registry = Registry("x_", {"model": 'a"b\\c\nd'})
    registry.metrics.append(histogram)
    (family,) = families(registry).values()
    found = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    for bound in SECONDS:
        key = next(le for le in found if le[0].isdigit() and math.isclose(float(le), bound))
        assert found[key] == sum(value <= bound for value in values)
    assert found["+Inf"] == found["x_time_seconds_count"] == len(values)
    assert found["x_time_seconds_sum"] == pytest.approx(sum(values))
    assert {sample.labels["model"] for sample in family.samples} == {'a"b\\c\nd'}
    assert histogram.cumulative[bisect_left(SECONDS, 0.1)] == sum(value <= 0.1 for value in values)


def test_counters_and_gauges_render_their_values() -> None:
    counter, level = Counter("ends_total", "Ends.", ["reason"]), [1.0]
    counter.add(2, "stop")
    counter.add(0.5, "stop")
    counter.raise_to(7, "abort")
    counter.raise_to(3, "abort")
    registry = Registry("", {})
    registry.metrics += [counter, Gauge("level", "Level.", lambda: level[0])]
    level[0] = 4.25
    found = families(registry)
    assert {s.labels["reason"]: s.value for s in found["ends"].samples} == {"stop": 2.5, "abort": 7}
    assert [s.value for s in found["level"].samples] == [4.25]
    assert counter.sum == 9.5


def test_counters_keep_their_totals_when_a_new_core_counts_from_zero() -> None:
    metrics = new_metrics()
    for step in (3, 10, 10, 2, 5):  # the core is replaced after its 10th step
        metrics.on_progress(progress(step, execute_s=step / 10))
    assert metrics.core.steps.sum == 15
    assert metrics.core.step_seconds.get("device") == pytest.approx(1.5)


def test_the_batch_sizes_of_the_core_become_the_histogram_of_step_sizes() -> None:
    metrics, rng = new_metrics(), random.Random(4)
    sizes = []
    for epoch in range(3):
        stats = CoreStats()
        for _ in range(100 - 30 * epoch):
            sizes.append(rng.choice([1, 2, 3, 4, 5, 64, 65, 4096, 5000]))
            stats.on_step(sizes[-1], sizes[-1], 0, sizes[-1], 0.01, 0.0)
            if rng.random() < 0.3:
                report(metrics, stats)
        report(metrics, stats)
    core = metrics.core
    assert core.steps.sum == len(sizes)
    for histogram, bounds in ((core.batch, ROWS), (core.step_tokens, STEP_TOKENS)):
        assert (histogram.sum, histogram.count) == (sum(sizes), len(sizes))
        assert histogram.cumulative[:-1] == [sum(size <= bound for size in sizes) for bound in bounds]


def report(metrics: EngineMetrics, stats: CoreStats) -> None:
    rows = {"num_rows_in_steps": stats.num_rows, "num_steps_by_rows": list(stats.num_steps_by_rows)}
    rows |= {"num_step_tokens": stats.num_step_tokens, "num_steps_by_tokens": list(stats.num_steps_by_tokens)}
    metrics.on_progress(progress(stats.num_results, **rows))


def test_gauges_with_labels_are_read_at_the_scrape() -> None:
    depths = {"clients": 3.0}
    metrics = EngineMetrics(new_spec(), lambda: depths)
    memory = {"worker_memory_bytes": [100, 200], "num_steps_in_flight": 2}
    metrics.on_progress(progress(**memory))  # type: ignore[arg-type]
    depths["clients"] = 5.0
    found = families(metrics)
    memory_by_rank = {s.labels["rank"]: s.value for s in found["tokenloom_worker_memory_bytes"].samples}
    depth_by_socket = {s.labels["socket"]: s.value for s in found["tokenloom_socket_queue_depth"].samples}
    assert (memory_by_rank, depth_by_socket) == ({"0": 100, "1": 200}, {"clients": 5, "workers": 2})


def test_the_dashboard_shows_every_metric_and_the_alerts_use_existing_ones() -> None:
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    kinds = [line.split() for line in GOLDEN.read_text().splitlines()]
    known = {name + ending: name for kind, name in kinds for ending in endings[kind]}
    for file in ("grafana.json", "alerts.yml", "alerts_test.yml"):
        used = set(re.findall(r"\btokenloom_[a-z0-9_]+", (DASHBOARDS / file).read_text()))
        assert used and used <= known.keys(), (file, used - known.keys())
        if file == "grafana.json":
            assert {known[name] for name in used} == set(known.values()), "each metric has its panel"


def test_a_request_refused_by_the_core_counts_as_refused_not_as_finished() -> None:
    bench = Bench()
    for kind in ("overloaded", "internal"):
        bench.core_request(kind, params={"n": 2})
        error = ErrorInfo(kind, "a test")
        bench.core(finished=[Finished(key=key, reason="error", error=error) for key in keys_of(bench)])
    metrics = bench.frontend.metrics
    assert metrics.refused.get("overloaded") == metrics.refused.sum == 1
    assert metrics.finished.sum == metrics.finished.get("error") == metrics.end_to_end.count == 2
    assert metrics.num_open == 0


def keys_of(bench: Bench) -> list[int]:
    """Return the keys of the answers of the last request."""
    return [child.key for child in bench.to_core[-1].children]


def test_sums_hold_for_any_traffic_and_any_end_of_answers() -> None:
    rng, bench = random.Random(9), Bench()
    num_tokens: dict[int, int] = {}  # by key of an open answer
    id_by_key: dict[int, str] = {}
    made = 0
    for turn in range(400):
        if rng.random() < 0.4:
            prompt = encode_ids(range(5, 5 + rng.randrange(1, 9)))
            params = {"max_tokens": 200, "n": rng.choice([1, 1, 3])}
            bench.core_request(f"r{turn}", params=params, prompt_token_ids=prompt)
            keys = keys_of(bench)
            num_tokens |= dict.fromkeys(keys, 0)
            id_by_key |= dict.fromkeys(keys, f"r{turn}")
            started = [Started(key=key, num_cached_tokens=rng.randrange(2)) for key in keys]
            bench.core(accepted=keys[:1], started=started)
        new = {key: rng.randrange(1, 5) for key in num_tokens if num_tokens[key] < 150 and rng.random() < 0.5}
        ended = [key for key in new if rng.random() < 0.1]
        bench.tokens(
            *((key, num_tokens[key], [7] * count) for key, count in new.items()),
            finished=[Finished(key=key, reason=rng.choice(["stop", "length", "timeout"])) for key in ended],
        )
        made += sum(new.values())
        for key, count in new.items():
            num_tokens[key] += count
        aborted = rng.choice(list(id_by_key.values())) if id_by_key and rng.random() < 0.05 else None
        if aborted is not None:
            bench.say(Abort(request_id=aborted))
        for key in [key for key in num_tokens if key in ended or id_by_key[key] == aborted]:
            del num_tokens[key], id_by_key[key]
        bench.to_core.clear()
    frontend = bench.frontend
    metrics = frontend.metrics
    assert metrics.num_open == len(num_tokens) > 0
    frontend.stop("the test is over")
    assert metrics.num_open == 0
    assert metrics.generation_tokens.sum == metrics.output_lengths.sum == made
    assert metrics.prompt_tokens.sum == metrics.prompt_tokens_by_source.sum > 0
    assert metrics.first_token.count + metrics.inter_token.count == made
    assert metrics.aborts.sum == metrics.aborts.get("client") == metrics.finished.get("abort") > 0
    assert metrics.timeouts.get("running") + metrics.timeouts.get("waiting") == metrics.finished.get("timeout") > 0
    ends = metrics.finished.sum
    assert ends == metrics.preempted.count == metrics.param_max_tokens.count >= metrics.param_n.count > 0
    assert metrics.param_max_tokens.sum == 200 * ends
    assert ends == metrics.end_to_end.count == metrics.prompt_lengths.count == metrics.output_lengths.count
    assert {reason for (reason,) in metrics.finished.totals} == {"stop", "length", "abort", "timeout", "error"}


def test_read_and_render_return_equal_values() -> None:
    def key(name: str, labels: dict[str, str]) -> tuple[str, frozenset[tuple[str, object]]]:
        bound = {"le": float(labels["le"])} if "le" in labels else {}
        return name, frozenset((labels | bound).items())

    metrics = new_metrics()
    metrics.queue.observe(0.5)
    metrics.refused.add(3, "size")
    samples = [each for family in families(metrics).values() for each in family.samples]
    rendered = {key(each.name, each.labels): each.value for each in samples}
    read: dict[object, float] = {}
    for metric in msgspec.msgpack.decode(msgspec.msgpack.encode(metrics.read()), type=list[messages.Metric]):
        name, labels = metric.name, metric.labels
        if isinstance(metric, messages.Histogram):
            read |= {key(f"{name}_bucket", labels | {"le": bound}): count for bound, count in metric.buckets.items()}
            read |= {key(f"{name}_sum", labels): metric.sum, key(f"{name}_count", labels): metric.count}
        else:
            assert isinstance(metric, messages.Counter) == name.endswith("_total")
            read[key(name, labels)] = metric.value
    assert read.keys() == rendered.keys() and len(read) == len(samples)
    assert {each for each in read if read[each] != rendered[each]} <= {
        each for each in rendered if each[0] == "tokenloom_step_age_seconds"
    }
