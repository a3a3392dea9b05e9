"""The metrics of adapters are those of ended answers and of the core's reports, with a bounded number of names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend.cli.running.status import lines
from tokenloom.frontend.server.metrics.adapter_metrics import OTHER, AdapterMetrics
from tokenloom.ipc.messages.adapter import AdaptersProgress
from tokenloom.ipc.messages.client import GetInfo, Health, Info
from tokenloom.ipc.messages.core import Finished, Started
from tokenloom.ipc.messages.metrics import Counter, Gauge
from tokenloom.ipc.messages.supervisor import Progress
from tokenloom.tests.frontend.bench import Bench, ids
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec, write_adapter

STATE = AdaptersProgress(
    num_slots=4, num_ready=2, num_filling=1, num_waiting=3, num_queued=20, num_hits=15, num_fills=5, num_failed_fills=1,
    fill_s=0.5, wait_s=2.0, num_closed=1, running=[b"a" * 32], waiting=[b"b" * 32, b"c" * 32],
)  # fmt: skip


def new_metrics(max_names: int = 100) -> AdapterMetrics:
    totals: dict[object, float] = {}

    def increase(key: object, total: float) -> float:
        known, totals[key] = totals.get(key, 0.0), total
        return total - known

    return AdapterMetrics(increase, lambda digest: ["sql"] if digest == b"a" * 32 else [], 4, max_names)


def values(metrics: AdapterMetrics) -> dict[tuple[str, ...], float]:
    found = {}
    for metric in metrics.metrics:
        for each in metric.read(metric.name, {}):
            assert isinstance(each, Counter | Gauge)
            found[each.name.removeprefix("adapter_"), *each.labels.values()] = each.value
    return found


def test_reports_of_the_core_become_totals_and_states() -> None:
    metrics = new_metrics()
    for num_fills in (2, 5):
        metrics.on_progress(msgspec.structs.replace(STATE, num_fills=num_fills))
    found = values(metrics)
    info = next(labels for labels in found if labels[0] == "lora_requests_info")
    assert info == ("lora_requests_info", "4", "sql", f"{b'b'.hex() * 12:.12},{b'c'.hex() * 12:.12}")
    assert found.pop(info) > 1.7e9, "unix seconds"
    assert found == {
        ("slots", "ready"): 2,
        ("slots", "filling"): 1,
        ("slots", "empty"): 1,
        ("waiting_requests",): 3,
        ("queued_total",): 20,
        ("slot_hits_total",): 15,
        ("fills_total", "ok"): 5,
        ("fills_total", "failed"): 1,
        ("fill_seconds_total",): 0.5,
        ("wait_seconds_total",): 2.0,
        ("closed_slots_total",): 1,
    }


def test_names_are_labels_up_to_a_limit_and_the_others_share_one() -> None:
    metrics = new_metrics(max_names=2)
    for name in ("a", "b", "c", "d", "a"):
        metrics.on_end(name, 7, 3)
    assert metrics.requests.totals == {("a",): 2, ("b",): 1, (OTHER,): 2}
    assert metrics.tokens.sum == 15 and metrics.prompt_tokens.sum == 35


def test_the_dashboard_gets_the_adapters_with_the_most_tokens_and_those_at_work() -> None:
    metrics = new_metrics()
    metrics.on_end("chat", 7, 30)
    metrics.on_end("sql", 7, 3)
    metrics.on_progress(STATE)
    summary = metrics.summary()
    assert (summary["slots"], summary["ready"], summary["hit_rate"], summary["fill_s"]) == (4, 2, 0.75, 0.1)
    rows = summary["rows"]
    assert isinstance(rows, list)
    states = [(row["name"], row["state"], row["tokens"]) for row in rows]
    assert states[:2] == [("chat", "idle", 30), ("sql", "running", 3)] and len(states) == 4


def test_ended_answers_count_for_their_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_adapter(tmp_path / "a")
    spec = adapter_spec(tmp_path / "run", lora_modules=[f"sql={source}"])
    bench = Bench(config=spec.config, run_directory=spec.run_directory)
    bench.frontend.adapters.load_modules()
    for request_id, adapter in (("one", "sql"), ("two", "sql"), ("base", ""), ("named", "sample")):
        key = bench.submit(request_id, adapter=adapter)
        bench.tokens(
            (key, 0, ids("The The")[:2]), started=[Started(key=key)], finished=[Finished(key=key, reason="length")]
        )
    assert bench.frontend.metrics.adapters is not None
    assert bench.frontend.metrics.adapters.requests.totals == {("sql",): 2}
    assert bench.frontend.metrics.adapters.tokens.totals == {("sql",): 4}
    progress = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0, adapters=STATE)
    bench.frontend.on_control_message(progress)
    assert (
        'tokenloom_adapter_slots{engine="0",model_name="sample",state="filling"} 1.0' in bench.frontend.metrics.render()
    )
    bench.heard()
    (info,) = bench.say(GetInfo(query_id=1))
    assert isinstance(info, Info) and info.max_loras == 8
    health = Health(query_id=1, is_ready=True, is_stalled=False, step=1, step_age_s=0.0, num_running=0, num_waiting=0)
    assert "adapters   3 loaded, up to 8 in a batch" in lines(health, info, 3)
    assert not [line for line in lines(health, msgspec.structs.replace(info, max_loras=0)) if "adapters" in line]
    bench.frontend.stop("the test ends")
