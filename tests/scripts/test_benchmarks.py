"""Every benchmark runs to its end on the demo model and writes its documented figures."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.bench_contestant import SCRIPTS
from tokenloom.tests.support.network_hosts import obstacle

pytestmark = pytest.mark.timeout(400)

TIMEOUT_S = 300  # four processes that import torch, on a crowded machine
SMALL_ENGINE = ("--max-model-len", "256", "--num-kv-blocks", "256")


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/"
    )
    assert done.returncode == 0, f"{script} {arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_json(file: Path, script: str, *arguments: str) -> dict[str, Any]:
    printed = run(script, *arguments, "--json", str(file))
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["benchmark"] in printed and document["machine"]["commit"]
    assert next(iter(document["rows"][0])) in printed
    return document


def test_the_engine_is_measured_without_a_model(tmp_path: Path) -> None:
    arguments = ("--requests", "24", "--in", "5", "--out", "40", "--rounds", "2", "--steps", "30")
    document = run_json(tmp_path / "out.json", "bench_engine.py", *arguments)
    assert [row["round"] for row in document["rows"]] == [1, 2]
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    assert document["notes"]["ratio of the two"] > 0
    assert document["notes"]["core's median step with 24 rows, µs"] > 0


@pytest.mark.nightly
def test_the_router_is_measured_by_itself(tmp_path: Path) -> None:
    document = run_json(tmp_path / "out.json", "bench_router.py", "--cores", "2", "20", "--requests", "50")
    assert [row["cores"] for row in document["rows"]] == [2, 20]
    assert all(0 < row["pick_p50_us"] <= row["pick_p99_us"] for row in document["rows"])
    assert document["notes"]["full index, MB"] < 150


@pytest.mark.nightly
def test_replicas_are_compared_with_one_engine(tmp_path: Path) -> None:
    arguments = ("demo", "--rows", "2", "3", "--in", "9", "--out", "5", *SMALL_ENGINE)
    document = run_json(tmp_path / "out.json", "bench_replicas.py", *arguments)
    assert [row.get("2 rows a replica") for row in document["rows"][:4]] == ["2 replicas", "one engine"] * 2
    assert all(document["notes"][f"throughput relative to one engine, {rows} rows a replica"] > 0 for rows in (2, 3))


@pytest.mark.nightly
def test_throughput_is_compared_with_transformers(tmp_path: Path) -> None:
    arguments = ("demo", "3", "9", "5", "--with-transformers", *SMALL_ENGINE)
    document = run_json(tmp_path / "out.json", "bench_throughput.py", *arguments)
    assert [row["engine"] for row in document["rows"]] == ["tokenloom", "transformers"] * 2
    assert document["rows"][0]["out_tokens_per_s"] == pytest.approx(15 / document["rows"][0]["seconds"])
    assert document["notes"]["throughput relative to transformers"] > 0


@pytest.mark.nightly
def test_latency_is_measured_in_both_modes(tmp_path: Path) -> None:
    arguments = ("demo", "9", "12", "--with-limits", *SMALL_ENGINE)
    document = run_json(tmp_path / "out.json", "bench_latency.py", *arguments)
    rows = {row["mode"]: row for row in document["rows"]}
    assert rows.keys() == {"processes", "in_process"}
    for row in rows.values():
        assert row["ttft_ms"] > 0 and row["itl_p99_ms"] >= row["itl_p50_ms"] > 0
        assert row["share_of_limit"] > 0


@pytest.mark.nightly
def test_a_kernel_step_is_measured_beside_its_limit(tmp_path: Path) -> None:
    document = run_json(tmp_path / "out.json", "bench_kernels.py", "demo", "--rounds", "1")
    decodes = ["decode 1 x 160", "decode 16 x 60", "decode 32 x 160", "decode 16 x 60, 8 of 2048"]
    assert [row["case"] for row in document["rows"]] == [*decodes, "prefill 1024"]
    assert all(row["least_ms"] > 0 and row["share_of_limit"] > 0 for row in document["rows"])


@pytest.mark.nightly
def test_requests_with_images_are_measured_in_all_parts(tmp_path: Path) -> None:
    sizes = {"rounds": 1, "side": 96, "requests": 3, "rows": 2, "out": 900, "images": 2, "batch": 2, "many": 20}
    shape = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    more = ("--max-model-len", "1024", "--with-transformers")
    document = run_json(
        tmp_path / "out.json", "bench_multimodal.py", str(SCRIPTS.parent / "demo/vision"), *shape, *more
    )
    parts = ["one image", "image", "image again", "text", "text again", "rows alone", "rows beside images"]
    more_parts = ["batch of 2", "transformers, batch of 2", "20 images"]
    assert [row["part"] for row in document["rows"]] == [*parts, *more_parts]
    assert document["notes"]["encodes of one image in 3 requests"] == 1
    assert "after 20 distinct images" in document["notes"]


@pytest.mark.nightly
def test_transcripts_are_measured_beside_transformers(tmp_path: Path) -> None:
    sizes = {"rounds": 2, "clip-s": 3, "transcript": 9, "batch": 2}
    shape = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    document = run_json(
        tmp_path / "out.json", "bench_multimodal.py", str(SCRIPTS.parent / "demo/audio"), "--audio", *shape
    )
    names = ["engine, 1 at once", "transformers, 1 at once", "engine, 2 at once", "transformers, 2 at once"]
    assert [row["part"] for row in document["rows"]] == names
    assert all(row["audio_s_per_s"] > 0 for row in document["rows"])
    assert document["notes"]["speed of 2 at once, relative to transformers"] > 0


@pytest.mark.nightly
def test_requests_are_measured_beside_other_requests(tmp_path: Path) -> None:
    shape = ("--rounds", "1", "--shared", "150", "--prompt", "100", "--streams", "3")
    document = run_json(tmp_path / "out.json", "bench_mixed.py", "demo", *shape, *SMALL_ENGINE)
    (row,) = document["rows"]
    assert row["ttft_ms"] > 0 and row["ttft_cached_ms"] > 0
    assert row["itl_max_during_ms"] >= row["itl_p99_during_ms"] >= row["itl_p50_during_ms"]


@pytest.mark.nightly
def test_adapters_are_measured_beside_the_base_model_and_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shape = ("4", "9", "12", "--adapters", "1,3", "--rounds", "2", "--rank", "4", "--num-kv-blocks", "256")
    more = ("--with-peft", "--peft", "3", "--unused", "--loads", "--zipf", "6", "--zipf-batches", "2", "--slots", "2")
    document = run_json(tmp_path / "out.json", "bench_lora.py", "demo", *shape, *more)
    rows = [row["adapters"] for row in document["rows"]]
    beside_peft = ["3 adapters, beside peft", "peft, one after the other", "peft, one batch"]
    rotations = ["all resident", "a load each second", "2 resident", "6 by Zipf"]
    assert rows == ["base", "1 adapter", "3 adapters", *beside_peft, "not enabled", "enabled, unused", *rotations]
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    notes = document["notes"]
    least, most = notes["tokens_per_s with 3 adapters, of base"][1:]
    assert 0 < least <= notes["tokens_per_s with 3 adapters, of base"][0] <= most
    assert all(count >= 1 for count in notes["loads by round"]) and len(notes["loads by round"]) == 2


@pytest.mark.nightly
def test_streams_are_counted_to_the_exact_token(tmp_path: Path) -> None:
    shape = ("--streams", "8", "--out", "20", "--rounds", "1", "--step-ms", "2")
    document = run_json(tmp_path / "out.json", "bench_sse.py", *shape)
    assert len(document["rows"]) == 2 and all(row["tokens_per_cpu_s"] > 0 for row in document["rows"])
    assert document["rows"][1]["tokens_per_event"] < 3


@pytest.mark.nightly
def test_start_up_is_timed_and_leaves_no_process(tmp_path: Path) -> None:
    arguments = ("demo", "--rounds", "1", "--idle-s", "0.5", *SMALL_ENGINE)
    document = run_json(tmp_path / "out.json", "bench_startup.py", *arguments)
    (row,) = document["rows"]
    assert 0 < row["ready_s"] < row["first_token_s"] and row["stop_s"] < 10
    assert len(document["notes"]["pss_mib"]) == 4 and any(
        "load weights" in line for line in document["notes"]["phases"]
    )


@pytest.mark.nightly
def test_this_engine_is_compared_with_peers_and_limits(tmp_path: Path) -> None:
    document = run_json(tmp_path / "out.json", "bench_compare.py", "demo", "3", "9", "6", "--cpu", *SMALL_ENGINE)
    ours, theirs = document["rows"]
    assert (ours["engine"], theirs["engine"]) == ("tokenloom", "transformers")
    assert ours["x_ours"] == 1 and theirs["x_ours"] > 0 and ours["share_of_limit"] > 0
    assert len(document["notes"]["machine by round"]) == 2
    assert any("worker" in name for name in document["notes"]["CPU seconds of tokenloom"])


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Run an engine on the demo model and yield its address."""
    command = [sys.executable, "-m", "tokenloom.frontend.launch", "--listen", f"ipc://{tmp_path}/engine.sock"]
    with subprocess.Popen([*command, *SMALL_ENGINE], stdout=subprocess.PIPE, cwd="/") as engine:
        assert engine.stdout is not None
        printed = b""
        while b"Ready at" not in printed:
            assert select.select([engine.stdout], [], [], TIMEOUT_S)[0], "not ready in time"
            data = os.read(engine.stdout.fileno(), 1 << 16)
            assert data, "engine-launch ended"
            printed += data
        yield f"ipc://{tmp_path}/engine.sock"
        engine.terminate()
        engine.wait(TIMEOUT_S)


@pytest.mark.nightly
def test_a_running_engine_is_measured_under_poisson_arrivals(address: str, tmp_path: Path) -> None:
    arguments = (address, "--rate", "50", "inf", "--num-requests", "12", "--in", "3:20", "--out", "2:9")
    document = run_json(tmp_path / "out.json", "bench_serve.py", *arguments)
    assert [row["finished"] for row in document["rows"]] == [12, 12]
    assert all(row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 for row in document["rows"])


@pytest.mark.nightly
def test_the_gpu_benchmark_also_runs_on_a_cpu(tmp_path: Path) -> None:
    arguments = ("--models", "demo", "--requests", "4", "--lengths", "3", "20", "--context", "70", "--device", "cpu")
    document = run_json(tmp_path / "out.json", "gpu_bench.py", *arguments)
    rows = {row["case"].removeprefix("demo: "): row for row in document["rows"]}
    steps = ["steps of one row", "steps of many rows"]
    assert list(rows) == [*steps, "one row", "many rows", "requests", "memory", "transformers"]
    assert all("not_measured" in rows[case] for case in steps)
    assert all(rows[case]["share_of_roofline"] > 0 for case in ("one row", "many rows", "requests"))
    assert rows["transformers"]["ours_times_it"] > 0


@pytest.mark.nightly
@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can")
def test_two_hosts_are_measured_beside_one(tmp_path: Path) -> None:
    arguments = ("--pairs", "1", "--cuts", "1", "--idle-seconds", "2")
    document = run_json(tmp_path / "out.json", "bench_scale.py", *arguments)
    found = {(row["part"], row["where"]): row["median"] for row in document["rows"]}
    assert all(value >= 0 for value in found.values()) and len(found) == 11
    assert LEASE_S - 1 < found["cut link to notice, s", "head"] < LEASE_S + 1.5
