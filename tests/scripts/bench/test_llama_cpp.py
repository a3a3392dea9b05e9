"""llama.cpp's programs are asked for the work that the engine does, and a build that would be slow is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.scripts.bench.llama_cpp import LlamaBatch, LlamaCpp, unused_instructions
from tokenloom.tests.scripts.bench.fake_llama_cpp import DECODE_RATE, PROMPT_RATE, calls_of, write_llama_cpp

LINE = "CPU : SSE3 = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 1 | AVX512_VNNI = 0 | AVX512_BF16 = 1 | OPENMP = 1 | "
FILE = Path("/model.gguf")


def test_a_build_that_uses_what_the_processor_has_is_taken(tmp_path: Path) -> None:
    assert LlamaCpp(write_llama_cpp(tmp_path, LINE), 2).check({"avx2", "fma", "avx512f"}) == LINE.strip()


@pytest.mark.parametrize(
    ("flags", "unused"),
    [
        ({"avx2", "fma", "avx512f", "avx512_bf16"}, []),
        ({"avx2", "avx512_vnni", "f16c"}, ["F16C", "AVX512_VNNI"]),
        ({"amx_int8", "sse2"}, ["AMX_INT8"]),
    ],
)
def test_the_system_line_names_each_instruction_that_the_processor_has(flags: set[str], unused: list[str]) -> None:
    assert unused_instructions(LINE, flags) == unused


def test_a_set_up_that_cannot_be_measured_is_refused_with_its_mend(tmp_path: Path) -> None:
    folder = write_llama_cpp(tmp_path, LINE)
    with pytest.raises(SystemExit, match=r"leaves F16C, AVX512_VNNI unused .*: build it .* -DGGML_NATIVE=ON"):
        LlamaCpp(folder, 2).check({"f16c", "avx512_vnni"})
    with pytest.raises(SystemExit, match=r"leaves F16C unused"):
        LlamaCpp(folder, 2).check({"f16c", "avx512_vnni"}, ["AVX512_VNNI"])
    assert LlamaCpp(folder, 2).check({"f16c", "avx512_vnni"}, ["AVX512_VNNI", "F16C"]) == LINE.strip()
    (folder / "libllama.so").write_bytes(b"no library")
    with pytest.raises(SystemExit, match=r"libllama\.so does not load .*: build it"):
        LlamaCpp(folder, 2).check(set())
    (folder / "llama-server").unlink()
    with pytest.raises(SystemExit, match=r"has no llama-server of llama\.cpp: build it"):
        LlamaCpp(folder, 2).check(set())


def test_one_request_is_measured_at_the_context_of_ours(tmp_path: Path) -> None:
    programs = LlamaCpp(write_llama_cpp(tmp_path, LINE), 2)
    assert programs.prompt_rate(FILE, 512) == PROMPT_RATE and programs.decode_rate(FILE, 128, 63) == DECODE_RATE
    common = ["-r", "1", "-o", "json", "-t", "2"]
    assert calls_of(tmp_path) == [
        ["llama-bench", "-m", str(FILE), "-p", "512", "-n", "0", *common],
        ["llama-bench", "-m", str(FILE), "-p", "0", "-n", "63", "-d", "128", *common],
    ]


def test_a_batch_computes_each_answer_token_once(tmp_path: Path) -> None:
    batch = LlamaBatch(LlamaCpp(write_llama_cpp(tmp_path, LINE), 2), FILE)
    prompts = [[1] * 40] * 8
    assert batch.generate(prompts, 21) == pytest.approx(8 * 40 / PROMPT_RATE + 20 / DECODE_RATE)
    assert batch.generate(prompts, 1) == pytest.approx(8 * 40 / PROMPT_RATE)  # the first token comes with the prompt
    first = calls_of(tmp_path)[0]
    assert first[first.index("-c") + 1] == str(8 * (40 + 20))


def test_a_programs_failure_is_reported(tmp_path: Path) -> None:
    folder = write_llama_cpp(tmp_path, LINE)
    with pytest.raises(SystemExit, match=r"llama-batched-bench ended with exit code 1: "):
        (folder / "llama-batched-bench").write_text("#!/bin/sh\nexit 1\n")
        LlamaCpp(folder, 2).batch_seconds(FILE, 2, 3, 4)
    (folder / "llama-batched-bench").write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(SystemExit, match=r"measured nothing: nothing"):
        LlamaCpp(folder, 2).batch_seconds(FILE, 2, 3, 4)
