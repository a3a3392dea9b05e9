"""Every benchmark runs to its end on the demo model and writes its documented figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.bench.cases.hybrids import CASES as HYBRID_STEPS
from tokenloom.scripts.bench.cases.kernels import CASES as STEPS
from tokenloom.scripts.bench.cases.states import CASES as STATE_STEPS
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.make_checkpoint import config_of
from tokenloom.scripts.bench.inputs.random_gguf import MIXTURES, write_random
from tokenloom.scripts.bench.llama_cpp import SYSTEM_NAMES
from tokenloom.scripts.bench.report import ROOT
from tokenloom.tests.scripts.bench.fake_llama_cpp import (
    DECODE_RATE,
    PROMPT_RATE,
    calls_of,
    write_llama_cpp,
)
from tokenloom.tests.support.network_hosts import obstacle
from tokenloom.tests.support.today import at_night

pytestmark = pytest.mark.timeout(400)

TIMEOUT_S = 300  # four processes that import torch, on a crowded machine
DEMO = ROOT / "demo"
SMALL_ENGINE = "--max-model-len 256 --num-kv-blocks 256"


class Figures(NamedTuple):
    """The rows and notes that a benchmark has written."""

    rows: list[dict[str, Any]]
    notes: dict[str, Any]

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]


BENCH = "-m tokenloom.frontend.launch bench"


def measure(folder: Path, command: str, program: str = BENCH) -> Figures:
    """Run a benchmark with its arguments."""
    file = folder / "out.json"
    words = [sys.executable, *program.split(), *command.split(), "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/")
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    document = json.loads(file.read_text())
    assert document["benchmark"] in done.stdout and document["machine"]["commit"]
    assert next(iter(document["rows"][0])) in done.stdout
    return Figures(document["rows"], document.get("notes", {}))


def random_file(folder: Path) -> Path:
    """Write a small GGUF file; return it."""
    file = folder / "model.gguf"
    write_random(file, config_of("qwen3", 256, 2, 4, 2, 512, 700, head_dim=64), MIXTURES["Q4_K_M"])
    return file


def everything() -> str:
    """Return the system line of a build that uses all instructions."""
    return " | ".join(f"{name} = 1" for name in SYSTEM_NAMES.values())


class Case(NamedTuple):
    """A command, a column with its values, and the figures of all rows and the notes that are above 0."""

    command: str
    column: str
    values: list[Any]
    figures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


CASES = {
    "engine": Case(
        "engine --requests 24 --in 5 --out 40 --rounds 2 --steps 30",
        "round",
        [1, 2],
        ("tokens_per_s",),
        ("ratio of the two", "core's median step with 24 rows, µs"),
    ),
    "submits": Case("engine --submits --rounds 1", "prompt", ["token ids", "text"], ("us_per_request",)),
    "replicas": Case(
        f"replicas demo --rows 2 3 --in 9 --out 5 {SMALL_ENGINE}",
        "2 rows a replica",
        [*["2 replicas", "one engine"] * 2, *[None] * 4],  # then four of "3 rows a replica"
        notes=tuple(f"throughput relative to one engine, {rows} rows a replica" for rows in (2, 3)),
    ),
    "speculation": Case(
        "speculation demo --rounds 1 --cases own,own-many --num-out 12 --many 3 --num-out-many 6",
        "case",
        ["own", "own-many"],
        ("off_tokens_per_s", "on_tokens_per_s"),
    ),
    "groups": Case("groups --chunks 2048 --draws 1", "what", ["bytes", *["pool"] * 3] * 2),
    "kernels": Case("kernels demo --rounds 1", "case", list(STEPS), ("least_ms", "share_of_limit")),
    "states": Case("states --rounds 1", "case", [name for name in STATE_STEPS for _ in range(7)], ("us_per_token",)),
    "hybrids": Case(
        "hybrids 50m-granite-h --rounds 1",
        "case",
        list(HYBRID_STEPS),
        ("call_ms", "layers_to_call", "transformers_to_call"),
    ),
    "transcripts": Case(
        f"multimodal {DEMO}/audio --audio --rounds 2 --clip-s 3 --transcript 9 --batch 2",
        "part",
        [f"{name}, {count} at once" for count in (1, 2) for name in ("engine", "transformers")],
        ("audio_s_per_s",),
        ("speed of 2 at once, relative to transformers",),
    ),
}


@pytest.mark.parametrize("name", ["engine", *at_night(*(name for name in CASES if name != "engine"))])
def test_a_benchmark_writes_its_figures(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = measure(tmp_path, case.command)
    assert found.column(case.column) == case.values
    assert all(row[figure] > 0 for row in found.rows for figure in case.figures)
    assert all(found.notes[note] > 0 for note in case.notes)


@pytest.mark.nightly
@pytest.mark.parametrize("thoughts", ["0 0", "2 3"])
def test_a_conversation_is_measured_beside_llama_server(thoughts: str, tmp_path: Path) -> None:
    file, programs = random_file(tmp_path), write_llama_cpp(tmp_path, everything())
    sizes = "--turns 4 --first 40 --answer 3 5 --result 20 30 --cold-every 2 --num-kv-blocks 64 --deterministic"
    found = measure(tmp_path, f"conversation {file} --llama-bin {programs} {sizes} --thoughts {thoughts}")
    for name in ("again_llama_server", "again_llama_server_swa_full"):
        assert found.column(name) == found.column("known")
    assert max(found.column("again_tokenloom")) < 16
    num_said = [
        known - prompt for known, prompt in zip(found.column("known")[1:], found.column("prompt"), strict=False)
    ]
    assert all(count == 0 if thoughts != "0 0" else 3 <= count <= 5 for count in num_said)
    assert [call.count("--swa-full") for call in calls_of(programs)] == [0, 1]
    assert found.notes["answers with the bits of a cold prompt"] == "2 of 2"
    assert found.notes["known tokens found by llama_server"] == 0 < found.notes["known tokens found by tokenloom"]


@pytest.mark.nightly
def test_the_router_is_measured_by_itself(tmp_path: Path) -> None:
    rows, notes = found = measure(tmp_path, "router --cores 2 20 --requests 50")
    assert found.column("cores") == [2, 20] and notes["full index, MB"] < 150
    assert all(0 < row["pick_p50_us"] <= row["pick_p99_us"] for row in rows)


@pytest.mark.nightly
def test_masks_are_measured_in_all_parts_of_an_answer(tmp_path: Path) -> None:
    rows, _ = found = measure(tmp_path, "masks --sizes 3000 --rounds 1")
    assert {*found.column("calls")} == {"object", "json", "tagged"}
    assert {*found.column("part")} == {"prose", "start", "call", "end"}
    assert all(0 < row["median_us"] <= row["max_us"] for row in rows)


def test_reading_is_measured_in_each_form(tmp_path: Path) -> None:
    rows, _ = found = measure(tmp_path, "reading --pieces 12 1000 --rounds 1")
    assert {"prose", "object", "json", "tagged", "literal", "forced"} <= {*found.column("read")}
    assert all(0 < row["character_us"] < row["answer_us"] for row in rows)


@pytest.mark.nightly
def test_throughput_is_compared_with_transformers(tmp_path: Path) -> None:
    rows, notes = found = measure(tmp_path, f"throughput demo 3 9 5 --with-transformers {SMALL_ENGINE}")
    assert found.column("engine") == ["tokenloom", "transformers"] * 2
    assert rows[0]["out_tokens_per_s"] == pytest.approx(15 / rows[0]["seconds"])
    assert notes["throughput relative to transformers"] > 0


@pytest.mark.nightly
def test_latency_is_measured_in_both_modes(tmp_path: Path) -> None:
    rows, _ = found = measure(tmp_path, f"latency demo 9 12 --with-limits {SMALL_ENGINE}")
    assert {*found.column("mode")} == {"processes", "in_process"}
    for row in rows:
        assert row["ttft_ms"] > 0 and row["itl_p99_ms"] >= row["itl_p50_ms"] > 0
        assert row["share_of_limit"] > 0


@pytest.mark.nightly
def test_requests_with_images_are_measured_in_all_parts(tmp_path: Path) -> None:
    sizes = "--rounds 1 --side 96 --requests 3 --rows 2 --out 900 --images 2 --batch 2 --many 20 --max-model-len 1024"
    _, notes = found = measure(tmp_path, f"multimodal {DEMO}/vision {sizes} --with-transformers")
    parts = ["one image", "image", "image again", "text", "text again", "rows alone", "rows beside images"]
    assert found.column("part") == [*parts, "batch of 2", "transformers, batch of 2", "20 images"]
    assert notes["encodes of one image in 3 requests"] == 1 and "after 20 distinct images" in notes


@pytest.mark.nightly
def test_requests_are_measured_beside_other_requests(tmp_path: Path) -> None:
    sizes = "--rounds 1 --shared 150 --prompt 100 --streams 3"
    ((row,), _) = measure(tmp_path, f"mixed demo {sizes} {SMALL_ENGINE}")
    assert row["ttft_ms"] > 0 and row["ttft_cached_ms"] > 0
    assert row["itl_max_during_ms"] >= row["itl_p99_during_ms"] >= row["itl_p50_during_ms"]


@pytest.mark.nightly
def test_adapters_are_measured_beside_the_base_model_and_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    sizes = "4 9 12 --adapters 1,3 --rounds 2 --rank 4 --num-kv-blocks 256 --zipf-batches 2 --slots 2"
    rows, notes = found = measure(tmp_path, f"lora demo {sizes} --with-peft --peft 3 --unused --loads --zipf 6")
    beside_peft = ["3 adapters, beside peft", "peft, one after the other", "peft, one batch"]
    rotations = ["all resident", "a load each second", "2 resident", "6 by Zipf"]
    names = ["base", "1 adapter", "3 adapters", *beside_peft, "not enabled", "enabled, unused", *rotations]
    assert found.column("adapters") == names and all(row["tokens_per_s"] > 0 for row in rows)
    middle, least, most = notes["tokens_per_s with 3 adapters, of base"]
    assert 0 < least <= middle <= most
    assert all(count >= 1 for count in notes["loads by round"]) and len(notes["loads by round"]) == 2


@pytest.mark.nightly
def test_streams_are_counted_to_the_exact_token(tmp_path: Path) -> None:
    rows, _ = measure(tmp_path, "sse --streams 8 --out 20 --rounds 1 --step-ms 2")
    assert len(rows) == 2 and all(row["tokens_per_cpu_s"] > 0 for row in rows)
    assert rows[1]["tokens_per_event"] < 3


@pytest.mark.nightly
def test_start_up_is_timed_and_leaves_no_process(tmp_path: Path) -> None:
    ((row,), notes) = measure(tmp_path, f"startup demo --rounds 1 --idle-s 0.5 {SMALL_ENGINE}")
    assert 0 < row["ready_s"] < row["first_token_s"] and row["stop_s"] < 10
    assert len(notes["pss_mib"]) == 4 and any("load weights" in line for line in notes["phases"])


@pytest.mark.nightly
def test_this_engine_is_compared_with_peers_and_limits(tmp_path: Path) -> None:
    rows, notes = found = measure(tmp_path, f"compare demo 3 9 6 --cpu {SMALL_ENGINE}")
    assert found.column("engine") == ["tokenloom", "transformers"]
    assert rows[0]["x_ours"] == 1 and rows[1]["x_ours"] > 0 and rows[0]["share_of_limit"] > 0
    assert len(notes["machine by round"]) == 2
    assert any("worker" in name for name in notes["CPU seconds of tokenloom"])


@pytest.mark.nightly
def test_a_file_is_measured_beside_the_programs_of_llama_cpp(tmp_path: Path) -> None:
    file, programs = random_file(tmp_path), write_llama_cpp(tmp_path, everything())
    sizes = f"9 6 --llama-bin {programs} --prompt 20 --batch 2 3 --rounds 2"
    rows, notes = found = measure(tmp_path, f"gguf {file} {sizes} {SMALL_ENGINE}")
    works = ["prompt of 20", "decode", "2 at once", "3 at once"]
    assert found.column("work") == works * 2 and all(row["tokenloom"] > 0 for row in rows)
    assert rows[0]["llama.cpp"] == PROMPT_RATE and rows[1]["llama.cpp"] == DECODE_RATE
    assert rows[2]["llama.cpp"] == pytest.approx(2 * 6 / (2 * 9 / PROMPT_RATE + 5 / DECODE_RATE))
    assert all(row["busy_cores"] >= 0 and row["load"] >= 0 for row in rows)
    middle, least, most = notes["decode, of llama.cpp's rate"]
    assert 0 < least <= middle <= most and len(notes["machine by round"]) == 2


@pytest.mark.nightly
def test_servers_of_a_file_are_measured_under_load(tmp_path: Path) -> None:
    file, programs = random_file(tmp_path), write_llama_cpp(tmp_path, everything())
    sizes = f"9 6 --llama-bin {programs} --slots 2 --rate inf --requests 3 --rounds 1"
    rows, notes = measure(tmp_path, f"slots {file} {sizes} {SMALL_ENGINE}")
    assert [row["server"] for row in rows] == ["tokenloom", "llama-server"]
    assert all(0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] for row in rows)
    assert rows[0]["tpot_p50_ms"] > 0 < rows[0]["out_tokens_per_s"]
    assert len(notes["out_tokens_per_s at inf/s, of llama-server's"]) == 3
    (call,) = calls_of(tmp_path)
    assert call[call.index("-np") + 1] == "2" and call[call.index("-c") + 1] == str(2 * (9 + 6))


@pytest.mark.nightly
def test_a_start_is_measured_beside_llama_server(tmp_path: Path) -> None:
    file, programs = random_file(tmp_path), write_llama_cpp(tmp_path, everything())
    rows, notes = found = measure(
        tmp_path, f"startup {file} --llama-bin {programs} --rounds 2 --idle-s 0 {SMALL_ENGINE}"
    )
    assert found.column("engine") == ["tokenloom", "llama-server"] * 2
    assert all(0 < row["ready_s"] < row["first_token_s"] and row["pss_mib"] > 0 for row in rows)
    assert notes["weights_mib"] == pytest.approx(file.stat().st_size / 2**20)
    assert all(call[-2:] == ["-c", "256"] for call in calls_of(programs)) and len(calls_of(programs)) == 2


@pytest.mark.nightly
def test_a_running_engine_is_measured_under_poisson_arrivals(tmp_path: Path) -> None:
    with Engine(tmp_path, SMALL_ENGINE.split()) as engine:
        engine.wait_ready()
        sizes = "--rate 50 inf --num-requests 12 --in 3:20 --out 2:9"
        rows, _ = found = measure(tmp_path, f"serve {engine.address} {sizes}")
    assert found.column("finished") == [12, 12]
    assert all(row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 for row in rows)


@pytest.mark.nightly
def test_the_gpu_benchmark_also_runs_on_a_cpu(tmp_path: Path) -> None:
    rows, _ = measure(tmp_path, "--models demo --small --device cpu", "-m tokenloom.scripts.gpu.engines")
    by_case = {row["case"].removeprefix("demo: "): row for row in rows}
    steps = ["steps of one row", "steps of many rows"]
    assert list(by_case) == [*steps, "one row", "many rows", "requests", "memory"]
    assert all("not_measured" in by_case[case] for case in steps)
    assert all(by_case[case]["share_of_roofline"] > 0 for case in ("one row", "many rows", "requests"))


@pytest.mark.nightly
@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can")
def test_two_hosts_are_measured_beside_one(tmp_path: Path) -> None:
    rows, _ = measure(tmp_path, "scale --pairs 1 --cuts 1 --idle-seconds 2")
    found = {(row["part"], row["where"]): row["median"] for row in rows}
    assert all(value >= 0 for value in found.values()) and len(found) == 11
    assert LEASE_S - 1 < found["cut link to notice, s", "head"] < LEASE_S + 1.5
